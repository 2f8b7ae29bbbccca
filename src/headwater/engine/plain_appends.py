"""Appends that have only a body and its type, to streams without special state: most appends, in one step.

Invariant: such an append has the same effect and result as in `Engine.append`; every other one is left to that. In
`memory` it is complete at once, and there is no record of it unless live readers need one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeAlias

from headwater.core import native
from headwater.core.catalog import ContentType, apply_plain_append
from headwater.core.content import split_json
from headwater.core.errors import Refusal, StorageBusy
from headwater.core.records import Append
from headwater.core.rules import AppendOutcome
from headwater.engine.clock import Clock, SteadyClock
from headwater.engine.committer import LENGTH_BYTES, RECORD_OVERHEAD_BYTES, CommitEntry, Committer
from headwater.engine.metrics import REQUEST_SECONDS_BOUNDS, Histogram, Metrics
from headwater.engine.quota import Quota
from headwater.engine.results import Appended, OnAppended
from headwater.engine.stream import LiveStream
from headwater.engine.waiting_appends import WAITS_FROM_BYTES
from headwater.engine.write_gate import WriteGate
from headwater.storage.interface import RECORD_MAX_BYTES, Storage
from headwater.storage.memory import MemoryStorage
from headwater.storage.tail import BLOCK_BYTES, Tail

_CLASSES: Final = (
    LiveStream, ContentType, Append, Appended, CommitEntry, Quota, Metrics, Histogram, SteadyClock, MemoryStorage, Tail,
)  # fmt: skip

PlainAppend: TypeAlias = Callable[[str, str | None, bytes, OnAppended], bytes | None]


class PlainAppends:
    def __init__(
        self,
        by_name: Mapping[str, LiveStream],
        server_streams: Collection[str],
        fenced: Collection[int],
        quota: Quota,
        metrics: Metrics,
        clock: Clock,
        gate: WriteGate,
        committer: Committer,
        storage: Storage,
        append: Callable[..., None],
        after_pending: Callable[[LiveStream, OnAppended, Refusal], None],
    ) -> None:
        self._by_name: Final = by_name
        self._server_streams: Final = server_streams
        self._fenced: Final = fenced
        self._quota: Final = quota
        self._metrics: Final = metrics
        self._clock: Final = clock
        self._gate: Final = gate
        self._committer: Final = committer
        self._memory: MemoryStorage | None = None
        """Set in mode `memory`."""
        if isinstance(storage, MemoryStorage) and not storage.waits_for_disk:
            self._memory = storage
        self._append: Final = append
        """`Engine.append`."""
        self._after_pending: Final = after_pending

    def used(self) -> tuple[dict[str, type], dict[str, Any]]:
        """The classes and the objects that the compiled path of these appends uses (`core/native/plain_append`)."""
        used = {
            "by_name": self._by_name,
            "server_streams": self._server_streams,
            "fenced": self._fenced,
            "quota": self._quota,
            "metrics": self._metrics,
            "clock": self._clock,
            "gate": self._gate,
            "committer": self._committer,
            "memory": self._memory,
            "tails": self._memory.tails if self._memory is not None else None,
            "split_json": split_json,
            "accepted": AppendOutcome.ACCEPTED,
            "max_body_bytes": RECORD_MAX_BYTES // LENGTH_BYTES,
            "record_overhead_bytes": RECORD_OVERHEAD_BYTES,
            "length_bytes": LENGTH_BYTES,
            "block_bytes": BLOCK_BYTES,
            "first_bound_s": REQUEST_SECONDS_BOUNDS[0],
        }
        return {each.__name__: each for each in _CLASSES}, used

    def append(self, name: str, content_type: str | None, body: bytes, done: OnAppended) -> bytes | None:
        """Append; returns the next offset if the append is complete, or None if `done` gets the result."""
        stream = self._by_name.get(name)
        quota = self._quota
        if (
            stream is None
            or not body
            or content_type != stream.type.header
            or stream.closed
            or stream.deleted
            or stream.mortal
            or stream.ages is not None
            or stream.id in self._fenced
            or name in self._server_streams
            or quota.namespaces is not None
            or len(body) > RECORD_MAX_BYTES // LENGTH_BYTES
        ):
            self._append(name, content_type, body, None, None, False, done)
            return None
        if stream.type.json:
            try:
                payload, lengths = split_json(body)
            except Refusal as refusal:
                self._after_pending(stream, done, refusal)
                return None
        else:
            payload, lengths = body, (len(body),)
        committer = self._committer
        if not committer.batch_is_checked:
            try:
                self._gate.check()
            except StorageBusy:
                if len(body) < WAITS_FROM_BYTES:
                    raise
                # It waits there.
                self._append(name, content_type, body, None, None, False, done)
                return None
        size = len(payload)
        count = len(lengths)
        start_index = stream.message_index
        start_position = stream.byte_position
        quota.take(start_position - stream.floor_position, size)
        # The times of a stream's messages never decrease, even if the clock is set back.
        at_ms = max(self._clock.now_ms(), stream.written_ms)
        message_index = start_index + count
        byte_position = start_position + size
        apply_plain_append(stream, count, size, at_ms)
        metrics = self._metrics
        metrics.appends += 1
        metrics.append_bytes += size
        metrics.appended_messages += count
        memory = self._memory
        if memory is not None and stream.followers is None and not committer.publishes_all:
            memory.extend(stream.id, payload, lengths, at_ms)
            stream.durable_index = message_index
            stream.durable_position = byte_position
            return native.offset_token(message_index, byte_position, stream.id)
        record = Append(stream.id, at_ms, start_index, start_position, payload, lengths)
        result = Appended(AppendOutcome.ACCEPTED, message_index, byte_position, False, None, stream.id)
        stream.in_flight += 1
        record_size = RECORD_OVERHEAD_BYTES + size + LENGTH_BYTES * count
        committer.submit(CommitEntry(stream, record, (), done, result), record_size)
        return None
