"""Appends that have only a body and its type, to streams without special state: most appends, in one step.

Invariant: such an append has the same effect and result as in `Engine.append`; every other one is left to that. In
`memory` it is complete at once, so there is no record of it, because only a journal and live readers need one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, TypeAlias

from headwater.core import native
from headwater.core.content import split_json
from headwater.core.errors import Refusal
from headwater.engine.clock import Clock
from headwater.engine.committer import LENGTH_BYTES, RECORD_OVERHEAD_BYTES, Committer
from headwater.engine.metrics import Metrics
from headwater.engine.quota import Quota
from headwater.engine.results import OnAppended
from headwater.engine.stream import LiveStream
from headwater.storage.interface import RECORD_MAX_BYTES
from headwater.storage.memory import MemoryStorage

PlainAppend: TypeAlias = Callable[[str, str | None, bytes, OnAppended], bytes | None]


class PlainAppends:
    def __init__(
        self,
        by_name: dict[str, LiveStream],
        server_streams: Collection[str],
        fenced: Collection[int],
        quota: Quota,
        metrics: Metrics,
        clock: Clock,
        committer: Committer,
        storage: MemoryStorage,
        append: Callable[..., None],
    ) -> None:
        self._by_name: Final = by_name
        self._server_streams: Final = server_streams
        self._fenced: Final = fenced
        self._quota: Final = quota
        self._metrics: Final = metrics
        self._clock: Final = clock
        self._committer: Final = committer
        self._storage: Final = storage
        self._append: Final = append
        """`Engine.append`."""

    def append(self, name: str, content_type: str | None, body: bytes, done: OnAppended) -> bytes | None:
        """Append; returns the next offset, or None if `done` is called with the result."""
        stream = self._by_name.get(name)
        quota = self._quota
        if (
            stream is None
            or not body
            or content_type != stream.type.header
            or stream.closed
            or stream.deleted
            or stream.mortal
            or stream.followers is not None
            or stream.ages is not None
            or stream.id in self._fenced
            or name in self._server_streams
            or self._committer.publishes_all
            or quota.namespaces is not None
        ):
            self._append(name, content_type, body, None, None, False, done)
            return None
        if stream.type.json:
            try:
                payload, lengths = split_json(body)
            except Refusal as refusal:
                done(refusal)
                return None
        else:
            payload, lengths = body, (len(body),)
        size = len(payload)
        count = len(lengths)
        index = stream.message_index + count
        position = stream.byte_position + size
        if RECORD_OVERHEAD_BYTES + size + LENGTH_BYTES * count > RECORD_MAX_BYTES:
            self._append(name, content_type, body, None, None, False, done)
            return None
        quota.take(stream.byte_position - stream.floor_position, size)
        # The times of a stream's messages never decrease, even if the clock is set back.
        at_ms = max(self._clock.now_ms(), stream.written_ms)
        self._storage.extend(stream.id, payload, lengths, at_ms)
        stream.message_index = stream.durable_index = index
        stream.byte_position = stream.durable_position = position
        stream.accessed_ms = stream.written_ms = at_ms
        metrics = self._metrics
        metrics.appends += 1
        metrics.append_bytes += size
        metrics.appended_messages += count
        return native.offset_token(index, position, stream.id)
