"""Storage mode `memory`: all data is in RAM, and lost when the process ends.

Each incarnation has one `Tail` with all of its bytes, which are freed when the incarnation is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwater.core.records import Append, Create, Record
from headwater.storage.arrival_times import TimeRun
from headwater.storage.interface import Committed, ImageOf, Usage
from headwater.storage.tail import Tail


class MemoryStorage:
    __slots__ = ("_bytes", "tails")

    waits_for_disk = False

    def __init__(self) -> None:
        self.tails: dict[int, Tail] = {}
        self._bytes = 0

    def recover(self) -> Iterable[Record]:
        return ()

    def takes_long(self) -> bool:
        return False

    def write(self, batch: Sequence[Committed]) -> None:
        """Nothing to make durable."""

    def publish(self, batch: Sequence[Committed]) -> None:
        for record, removed in batch:
            if type(record) is Append:
                if record.payload:
                    self.extend(record.id, record.payload, record.lengths, record.at_ms)
            elif type(record) is Create:
                self._create(record)
            if removed:
                for stream_id in removed:
                    self._bytes -= self.tails.pop(stream_id).size

    def extend(self, stream_id: int, payload: bytes, lengths: Sequence[int], at_ms: int) -> None:
        """Add messages to a stream, at once."""
        self.tails[stream_id].extend(payload, lengths, at_ms)
        self._bytes += len(payload)

    def boundary(self, stream_id: int, message_index: int) -> int | None:
        return self.tails[stream_id].boundary(message_index)

    def cut(
        self, stream_id: int, message_index: int, byte_position: int, end_index: int, max_bytes: int
    ) -> tuple[int, int]:
        return self.tails[stream_id].cut(message_index, byte_position, end_index, max_bytes)

    def lengths(self, stream_id: int, message_index: int, end_index: int) -> Sequence[int]:
        return self.tails[stream_id].lengths(message_index, end_index)

    def arrivals(self, stream_id: int, message_index: int, end_index: int) -> Sequence[TimeRun]:
        return self.tails[stream_id].arrivals(message_index, end_index)

    def first_since(self, stream_id: int, at_ms: int) -> int:
        return self.tails[stream_id].first_since(at_ms)

    def read(self, stream_id: int, byte_position: int, end_position: int) -> Sequence[bytes | memoryview]:
        return self.tails[stream_id].read(byte_position, end_position)

    def trim(self, stream_id: int, message_index: int, byte_position: int) -> None:
        tail = self.tails[stream_id]
        self._bytes -= byte_position - tail.byte_position
        tail.drop(message_index)
        assert tail.byte_position == byte_position, "a stream is trimmed at a boundary"

    def maintain(self, image_of: ImageOf) -> None:
        """Nothing to maintain."""

    def refusal(self) -> str | None:
        return None

    def busy(self) -> str | None:
        return None

    def usage(self) -> Usage:
        return Usage(self._bytes, self._bytes)

    def close(self) -> None:
        self.tails.clear()

    def _create(self, record: Create) -> None:
        fork = record.fork
        tail = Tail(fork.message_index, fork.byte_position) if fork is not None else Tail(0, 0)
        if record.payload:
            tail.extend(record.payload, record.lengths, record.at_ms)
        self.tails[record.id] = tail
        self._bytes += len(record.payload)
