"""The hot tails: the newest bytes of the streams in use, in memory, within one limit for all of them together.

What the journal has and the shards do not have yet is only here, so it is never dropped; `reached` says how far a
stream's shard has come. Beyond that, the streams that were used longest ago lose their oldest bytes first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from headwater.storage.tail import Tail

STREAM_OVERHEAD_BYTES: Final = 512
"""About what a tail takes in memory beside its bytes; counted, so that many small tails are bounded as well."""
MESSAGE_OVERHEAD_BYTES: Final = 8
_KEPT_SHARE: Final = 7 / 8
"""Dropping goes somewhat below the limit, so that it is not done anew for every append."""


class _Hot:
    __slots__ = ("reached_index", "tail")

    def __init__(self, index: int, position: int, reached_index: int) -> None:
        self.tail = Tail(index, position)
        self.reached_index = reached_index
        """Up to here the shard has the stream; below zero while it has not even heard of it."""

    def cost(self) -> int:
        return self.tail.size + MESSAGE_OVERHEAD_BYTES * len(self.tail.ends) + STREAM_OVERHEAD_BYTES


class HotTails:
    """Tails by incarnation, the one used last at the end."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._hot: OrderedDict[int, _Hot] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._hot)

    def get(self, stream_id: int) -> Tail | None:
        hot = self._hot.get(stream_id)
        if hot is None:
            return None
        self._hot.move_to_end(stream_id)
        return hot.tail

    def begin(self, stream_id: int, index: int, position: int) -> None:
        """A stream that no shard has heard of yet: it stays hot, even empty, until one has."""
        self._hot[stream_id] = _Hot(index, position, -1)
        self.bytes += STREAM_OVERHEAD_BYTES

    def extend(self, stream_id: int, index: int, position: int, payload: bytes, lengths: Sequence[int]) -> None:
        """Add messages that begin at (index, position), which is where the tail ends if there is one."""
        hot = self._hot.get(stream_id)
        if hot is None:
            hot = self._hot[stream_id] = _Hot(index, position, index)
            self.bytes += STREAM_OVERHEAD_BYTES
        else:
            self._hot.move_to_end(stream_id)
        tail = hot.tail
        assert tail.index + len(tail.ends) == index, "a tail has no gaps"
        tail.extend(payload, lengths)
        self.bytes += len(payload) + MESSAGE_OVERHEAD_BYTES * len(lengths)

    def reached(self, stream_id: int, index: int) -> None:
        """The shard has the stream up to `index`: what lies before may be dropped."""
        hot = self._hot.get(stream_id)
        if hot is not None and index > hot.reached_index:
            hot.reached_index = index

    def trim(self, stream_id: int, index: int) -> None:
        """Nobody asks for what lies before `index` any more, wherever it is."""
        hot = self._hot.get(stream_id)
        if hot is not None:
            before = hot.cost()
            hot.tail.drop(index)
            self.bytes -= before - hot.cost()

    def remove(self, stream_id: int) -> None:
        hot = self._hot.pop(stream_id, None)
        if hot is not None:
            self.bytes -= hot.cost()

    def shrink(self) -> None:
        """Get back under the limit, as far as the shards have come."""
        if self.bytes <= self._limit_bytes:
            return
        excess = self.bytes - int(self._limit_bytes * _KEPT_SHARE)
        for stream_id in list(self._hot):
            hot = self._hot[stream_id]
            before = hot.cost()
            self._drop_oldest(hot, excess)
            if hot.reached_index == hot.tail.end_index and not hot.tail.size:
                del self._hot[stream_id]
                dropped = before
            else:
                dropped = before - hot.cost()
            self.bytes -= dropped
            excess -= dropped
            if excess <= 0:
                break

    def clear(self) -> None:
        self._hot.clear()
        self.bytes = 0

    @staticmethod
    def _drop_oldest(hot: _Hot, excess: int) -> None:
        tail = hot.tail
        droppable = hot.reached_index - tail.index
        if droppable <= 0:
            return
        at = bisect_left(tail.ends, tail.position + excess, 0, droppable)
        tail.drop(tail.index + min(at + 1, droppable))
