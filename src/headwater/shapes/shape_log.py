"""The log of one shape: two Headwater streams, one for the snapshot and one for the changes after it.

The messages in the streams are the messages of the API, so a response is a slice of a stream. An index in memory maps
offsets of the API to offsets of the stream, and the newest changes are kept in memory as well. Invariant: readers see
only what the stream server has acknowledged, and a change is in the log once.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from headwater.shapes.errors import ShapeGoneError, UnavailableError
from headwater.shapes.messages import Entry
from headwater.shapes.offsets import AFTER_SNAPSHOT, BEFORE_ALL, LogOffset
from headwater.shapes.streams import ShapeStreamMissingError, Streams

ROOT: Final = "__shapes__"
START: Final = "-1"
APPEND_BYTES: Final = 1 << 20
_POINT_BYTES: Final = 64 << 10
"""The distance between two entries of the index."""


class _Headers(msgspec.Struct):
    lsn: str
    op_position: int


class _Message(msgspec.Struct):
    headers: _Headers


_messages: Final = msgspec.json.Decoder(list[_Message])
_raws: Final = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A part of the log: messages separated by commas, and the offset after them."""

    body: bytes
    end: LogOffset
    at_end: bool


@dataclass(slots=True)
class _Point:
    """An index entry: everything up to `after` is before `place` in the stream of changes."""

    after: LogOffset
    place: str


class ShapeLog:
    def __init__(self, streams: Streams, handle: str, *, tail_bytes: int, chunk_bytes: int) -> None:
        self._streams = streams
        self.snapshot_stream = f"{ROOT}/{handle}/snapshot"
        self.changes_stream = f"{ROOT}/{handle}/changes"
        self._tail_bytes_max = tail_bytes
        self._chunk_bytes = chunk_bytes
        self.chunks: list[str] = []
        """The end of each chunk of the snapshot in its stream."""
        self.is_snapshot_complete = False
        self.last = AFTER_SNAPSHOT
        """The newest entry of the changes."""
        self.changes_bytes = 0
        self._tail: deque[Entry] = deque()
        self._tail_bytes = 0
        self._before_tail = AFTER_SNAPSHOT
        self._points = [_Point(AFTER_SNAPSHOT, START)]
        self._since_point = 0
        self._place = START
        """The end of `last` in the stream of changes."""
        self._is_loaded = False
        self._loading = asyncio.Lock()
        self._gone = False
        self._changed: asyncio.Future[None] | None = None
        self._is_appending = False
        self._encoded: tuple[bytes, bytes] | None = None
        self.complete_lsn = 0
        """Every change of this shape that was committed up to this position is in the log."""

    # -- writing -------------------------------------------------------------------------------------------------

    async def create(self) -> None:
        await self._streams.create(self.snapshot_stream)
        await self._streams.create(self.changes_stream)
        self._is_loaded = True

    async def add_chunk(self, body: bytes, *, is_last: bool) -> None:
        """Append a chunk of the snapshot."""
        place = await self._retried(self.snapshot_stream, body, f"{len(self.chunks):010d}")
        self.chunks.append(place)
        self.is_snapshot_complete = is_last
        self._wake()

    def complete_snapshot(self) -> None:
        self.is_snapshot_complete = True
        self._wake()

    async def append(self, entries: Sequence[Entry], end_lsn: int) -> None:
        """Append whole transactions, in order. Entries that the log already has from before a restart are skipped.

        Until all are appended, readers do not count as up to date: otherwise an offset that they derive from an LSN
        could be before entries that they already have.
        """
        if not self._is_loaded:
            await self.load()
        self._is_appending = True
        try:
            await self._append_all(entries)
        finally:
            self._is_appending = False
        self.complete_lsn = end_lsn
        self._wake()

    async def _append_all(self, entries: Sequence[Entry]) -> None:
        batch: list[Entry] = []
        size = 0
        for entry in entries:
            if entry[0] <= self.last:
                continue
            batch.append(entry)
            size += len(entry[1])
            if size >= APPEND_BYTES:
                await self._append(batch)
                batch, size = [], 0
        if batch:
            await self._append(batch)

    async def _append(self, batch: list[Entry]) -> None:
        last = batch[-1][0]
        body = b",".join(message for _, message in batch)
        place = await self._retried(self.changes_stream, body, f"{last.lsn:020d}_{last.position:010d}")
        self.last, self._place = last, place
        self.changes_bytes += len(body)
        self._since_point += len(body)
        if self._since_point >= _POINT_BYTES:
            self._points.append(_Point(last, place))
            self._since_point = 0
        self._tail.extend(batch)
        self._tail_bytes += len(body)
        while self._tail_bytes > self._tail_bytes_max and self._tail:
            offset, message = self._tail.popleft()
            self._tail_bytes -= len(message)
            self._before_tail = offset

    async def _retried(self, stream: str, body: bytes, sequence: str) -> str:
        """Retry an append until its result is known: without it, the writer could not continue."""
        wait_s = 0.05
        while True:
            try:
                return await self._streams.append(stream, body, sequence)
            except UnavailableError:
                if self._gone:
                    raise
                await asyncio.sleep(wait_s)
                wait_s = min(2.0, wait_s * 2)
            except ShapeStreamMissingError:
                raise ShapeGoneError(f"the stream {stream} was deleted") from None

    async def load(self) -> None:
        """Rebuild the index and the tail from the streams, after a restart."""
        async with self._loading:
            if self._is_loaded:
                return
            place = START
            try:
                while True:
                    part = await self._streams.read(self.changes_stream, place)
                    found = _messages.decode(b"[" + part.body + b"]")
                    if found:
                        headers = found[-1].headers
                        self.last = LogOffset(int(headers.lsn), headers.op_position)
                        self._points.append(_Point(self.last, part.next_offset))
                        self.changes_bytes += len(part.body)
                    self._place = place = part.next_offset
                    if part.up_to_date:
                        break
                if self.chunks:
                    await self._streams.tail(self.snapshot_stream)
            except ShapeStreamMissingError:
                raise ShapeGoneError(f"the streams of {self.changes_stream} were deleted") from None
            self._before_tail = self.last
            self._is_loaded = True

    async def delete(self) -> None:
        self.drop()
        await self._streams.delete(self.changes_stream)
        await self._streams.delete(self.snapshot_stream)

    def drop(self) -> None:
        """Mark the log as dropped: appending ends, and waiting readers are woken."""
        self._gone = True
        self._wake()

    # -- reading -------------------------------------------------------------------------------------------------

    async def read(self, offset: LogOffset) -> LogChunk:
        """The next part after an offset. Waits for a snapshot that is being written."""
        if offset.in_snapshot:
            number = 0 if offset == BEFORE_ALL else offset.position
            while number >= len(self.chunks) and not self.is_snapshot_complete:
                await self.wait(None)
            if number < len(self.chunks):
                return await self._snapshot_chunk(number)
        if not self._is_loaded:
            await self.load()
        offset = max(offset, AFTER_SNAPSHOT)
        if offset >= self._before_tail:
            return self._from_tail(offset)
        return await self._from_stream(offset)

    async def _snapshot_chunk(self, number: int) -> LogChunk:
        place = self.chunks[number - 1] if number else START
        body = await self._range(self.snapshot_stream, place, self.chunks[number])
        is_last = self.is_snapshot_complete and number + 1 == len(self.chunks)
        end = AFTER_SNAPSHOT if is_last else LogOffset(0, number + 1)
        return LogChunk(body, end, at_end=is_last and self._is_end(end))

    def _from_tail(self, offset: LogOffset) -> LogChunk:
        if offset >= self.last:
            return LogChunk(b"", offset, at_end=self._is_end(offset))
        first = bisect_right(self._tail, offset, key=lambda entry: entry[0])
        taken: list[bytes] = []
        size = 0
        end = offset
        for number in range(first, len(self._tail)):
            end, message = self._tail[number]
            taken.append(message)
            size += len(message)
            if size >= self._chunk_bytes:
                break
        return LogChunk(b",".join(taken), end, at_end=self._is_end(end))

    async def _from_stream(self, offset: LogOffset) -> LogChunk:
        at = bisect_right(self._points, offset, key=lambda point: point.after) - 1
        start = self._points[at]
        if at + 1 < len(self._points):
            # A chunk spans several index entries.
            to = min(at + max(1, self._chunk_bytes // _POINT_BYTES), len(self._points) - 1)
            until, end = self._points[to].place, self._points[to].after
        else:
            until, end = self._place, self.last
        body = await self._range(self.changes_stream, start.place, until)
        if start.after != offset:
            body = _after(body, offset)
        return LogChunk(body, end, at_end=self._is_end(end))

    def events(self, chunk: LogChunk) -> bytes:
        """A chunk as server-sent events. All readers at the tail share one encoding."""
        if self._encoded is None or self._encoded[0] != chunk.body:
            lines = [b"data: " + bytes(raw) + b"\n\n" for raw in _raws.decode(b"[" + chunk.body + b"]")]
            self._encoded = (chunk.body, b"".join(lines))
        return self._encoded[1]

    def _is_end(self, offset: LogOffset) -> bool:
        return offset >= self.last and not self._is_appending

    async def _range(self, stream: str, place: str, until: str) -> bytes:
        pieces: list[bytes] = []
        try:
            while place != until:
                part = await self._streams.read(stream, place, until)
                pieces.append(part.body)
                if part.next_offset == place:
                    break
                place = part.next_offset
        except ShapeStreamMissingError:
            raise ShapeGoneError(f"the stream {stream} was deleted") from None
        return b",".join(piece for piece in pieces if piece)

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for new entries; return whether there are any. Raises `ShapeGoneError` if the shape was dropped."""
        if self._gone:
            raise ShapeGoneError("the shape was dropped")
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait((self._changed,), timeout=timeout_s)
        if self._gone:
            raise ShapeGoneError("the shape was dropped")
        return bool(done)

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None


def _after(body: bytes, offset: LogOffset) -> bytes:
    """The messages after an offset."""
    array = b"[" + body + b"]"
    kept = []
    for message, raw in zip(_messages.decode(array), _raws.decode(array), strict=True):
        if LogOffset(int(message.headers.lsn), message.headers.op_position) > offset:
            kept.append(bytes(raw))
    return b",".join(kept)
