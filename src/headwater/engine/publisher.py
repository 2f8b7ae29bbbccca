"""Publishing: notify the followers of a stream, and the observers of all streams, of durable records.

A follower is a cursor, so it only needs a notification that there may be more; the exact time does not matter. A few
followers are woken at once. Many are woken in slices, because each of them may encode and send a response, and other
clients must not wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from headwater.core.records import Append, Create, Delete, Record, Touch
from headwater.engine.clock import Clock
from headwater.engine.committer import CommitEntry, guarded, log_failure
from headwater.engine.metrics import Metrics
from headwater.engine.scheduler import Scheduler
from headwater.engine.slices import Slices
from headwater.engine.stream import LiveStream, StreamFollower
from headwater.engine.stream_refusals import not_found

AT_ONCE_MAX: Final = 128
"""Followers that one batch wakes at once. Waking one takes up to 80 microseconds."""
STEP_FOLLOWERS: Final = 4
"""Followers that are woken in one step of a slice."""


class StreamPublisher:
    def __init__(self, scheduler: Scheduler, clock: Clock, metrics: Metrics) -> None:
        self._slices = Slices(scheduler)
        self._clock = clock
        self._lag_seconds = metrics.delivery_lag_seconds
        self._waking: dict[int, bool] = {}
        """Streams whose followers are woken in slices, and whether they must be woken once more after that."""
        self.on_created: list[Callable[[LiveStream], None]] = []
        """Called when a new stream is durable, before its first followers are woken."""
        self.on_deleted: list[Callable[[LiveStream], None]] = []
        """Called when the end of a stream is durable, on request or by expiry."""
        self.on_changed: Callable[[LiveStream], None] | None = None
        """Called for every record that changes what readers see of a stream."""

    def publish(self, batch: Sequence[CommitEntry]) -> None:
        """Notify live readers of a durable batch: once per stream, for any number of its records."""
        woken: dict[int, tuple[LiveStream, int]] = {}
        on_changed = self.on_changed
        for entry in batch:
            stream = entry.stream
            if stream is None:
                continue
            if type(entry.record) is not Append:
                self._announce(stream, entry.record)
            if on_changed is not None and type(entry.record) is not Touch:
                guarded(on_changed, stream)
            if stream.followers is not None and type(entry.record) is not Touch:
                record = entry.record
                # If only other workers follow the stream, they record the lag.
                is_timed = len(stream.followers) > stream.relays
                woken.setdefault(stream.id, (stream, record.at_ms if type(record) is Append and is_timed else 0))
        at_once = AT_ONCE_MAX
        for stream, arrived_ms in woken.values():
            followers = tuple(stream.followers or ())
            at_once -= len(followers)
            if at_once < 0:
                self._wake_in_slices(stream, arrived_ms)
                continue
            _wake(stream, followers)
            self._observe_lag(arrived_ms)

    def wake(self, stream: LiveStream) -> None:
        """Wake the followers of one stream."""
        if stream.followers is not None:
            if len(stream.followers) > AT_ONCE_MAX:
                self._wake_in_slices(stream, 0)
            else:
                _wake(stream, tuple(stream.followers))

    def end_followers(self, stream: LiveStream) -> None:
        """Report the end of the stream to all its followers."""
        followers = tuple(stream.followers or ())
        if len(followers) <= AT_ONCE_MAX:
            for follower in followers:
                guarded(follower.gone, not_found(stream.name))
        else:
            self._slices.add(self._ending(stream, followers), _ignore)

    def _announce(self, stream: LiveStream, record: Record | None) -> None:
        if type(record) is Create:
            for on_created in self.on_created:
                guarded(on_created, stream)
        elif type(record) is Delete:
            self.end_followers(stream)
            for on_deleted in self.on_deleted:
                guarded(on_deleted, stream)

    def _observe_lag(self, arrived_ms: int) -> None:
        """Record the lag: all followers that keep up have been sent the messages received at that time."""
        if arrived_ms:
            self._lag_seconds.observe(max(self._clock.now_ms() - arrived_ms, 0) / 1000)

    def _wake_in_slices(self, stream: LiveStream, arrived_ms: int) -> None:
        if stream.id in self._waking:
            self._waking[stream.id] = True
        else:
            self._waking[stream.id] = False
            self._slices.add(self._waking_all(stream, arrived_ms), _ignore)

    def _waking_all(self, stream: LiveStream, arrived_ms: int) -> Iterator[None]:
        """Wake every follower at least once after the last batch of the stream, so that no follower misses it."""
        must_repeat = True
        while must_repeat:
            self._waking[stream.id] = False
            followers = tuple(stream.followers or ())
            for start in range(0, len(followers), STEP_FOLLOWERS):
                _wake(stream, followers[start : start + STEP_FOLLOWERS])
                yield
            must_repeat = self._waking[stream.id]
        del self._waking[stream.id]
        self._observe_lag(arrived_ms)

    def _ending(self, stream: LiveStream, followers: Sequence[StreamFollower]) -> Iterator[None]:
        for follower in followers:
            if follower in (stream.followers or ()):
                guarded(follower.gone, not_found(stream.name))
            yield


def _wake(stream: LiveStream, followers: Sequence[StreamFollower]) -> None:
    """Wake those of the followers that still follow the stream."""
    for follower in followers:
        following = stream.followers
        if following is not None and follower in following:
            try:
                follower.wake()
            except Exception:
                log_failure(follower.wake)


def _ignore(error: Exception | None) -> None:
    """Each follower is guarded, so there is no error."""
