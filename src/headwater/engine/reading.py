"""Read a stream: resolve offsets, cut chunks at message boundaries, join the data of forks and their sources.

A fork's offset space continues its source's: data before the fork point is read from the source, at the same
positions. A chain of forks is searched, not walked (see `lineage`), so a chunk costs its bytes and its spans.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, islice, repeat
from typing import Final, NamedTuple

import msgspec

from headwater.core.buckets import is_bucketed
from headwater.core.errors import InvalidOffset, OffsetGone, StreamNotFound
from headwater.core.offsets import BEGINNING, NOW, ZERO, Offset, parse_token
from headwater.core.records import ForkPoint
from headwater.core.rules import ForkRequest, check_retained, off_boundary, offset_gone, stream_recreated
from headwater.engine.checked_storage import CheckedStorage
from headwater.engine.cold_reads import ColdRead, Deferring, Pending, pending
from headwater.engine.lineage import Lineages
from headwater.engine.stream import LiveStream
from headwater.storage.arrival_times import UNKNOWN_MS
from headwater.storage.interface import Storage

Buffer = bytes | memoryview

SLICE_BYTES: Final = 256 * 1024
"""How much of a chunk is read from storage at a time, which limits the memory of a slow reader."""


class IncarnationSpan(NamedTuple):
    """Messages from `start` to `end` that are stored in one incarnation."""

    stream_id: int
    start: Offset
    end: Offset


class ReadChunk(msgspec.Struct, frozen=True):
    """The result of one read: a run of messages, and its position in the stream."""

    stream: LiveStream
    start: Offset
    end: Offset
    spans: Sequence[IncarnationSpan]
    up_to_date: bool
    closed: bool
    """Whether the stream is closed and this chunk reaches its end."""

    @property
    def length(self) -> int:
        return self.end.byte_position - self.start.byte_position


class StreamReader:
    """Reads streams from storage, below their durable tail."""

    def __init__(self, storage: Storage, by_id: Mapping[int, LiveStream], deferring: Deferring | None = None) -> None:
        self._storage = CheckedStorage(storage, by_id)
        self.is_tiered: Final = deferring is not None
        self.deferring: Final[Deferring] = deferring or nullcontext
        """A context in which reads of data in an object store raise `ColdRead` instead of waiting."""
        self._by_id = by_id
        self._lineages = Lineages(by_id)

    def begin(self, stream: LiveStream, token: str | None) -> Offset:
        """Where an ordinary read begins: `-1` or a missing offset is the first retained message.

        The base protocol has no other way to read a stream whose first messages were removed (§6). Below `/ds/` such a
        read is 410, and the reader bootstraps instead (extensions §2.2).
        """
        if (token is None or token == BEGINNING) and not is_bucketed(stream.name):
            return earliest(stream)
        return self.resolve(stream, token)

    def resolve(self, stream: LiveStream, token: str | None) -> Offset:
        """Resolve an offset of this stream, which must be retained: `-1` is the very first message."""
        if token is None or token == BEGINNING:
            if stream.durable_retained_index:
                check_retained(stream.id, ZERO, earliest(stream))
            return ZERO
        if token == NOW:
            return Offset(stream.durable_index, stream.durable_position)
        parsed = self.parse_offset(stream, token)
        if parsed.message_index > stream.durable_index:
            raise off_boundary(token)
        if parsed.message_index < stream.durable_retained_index:
            check_retained(stream.id, parsed, earliest(stream))
        if self.boundary(stream, parsed.message_index) != parsed.byte_position:
            raise off_boundary(token)
        return parsed

    def parse_offset(self, stream: LiveStream, text: str) -> Offset:
        """Parse a token, whether or not it is a message boundary; refuses other incarnations."""
        token = parse_token(text)
        if token is None:
            raise InvalidOffset(f"Offset {text!r} is malformed. Use -1, now, or one that the server returned.")
        if token.incarnation is not None and token.incarnation != stream.id:
            self._check_inherited(stream, token.offset, token.incarnation)
        return token.offset

    def _check_inherited(self, stream: LiveStream, offset: Offset, incarnation: int) -> None:
        """Accept an offset of a source up to the fork point, at any depth of forks; refuse others."""
        shared = True
        descendant = stream
        while descendant.fork is not None:
            shared = shared and offset <= descendant.base
            source = self._by_id.get(descendant.fork.source_id)
            if source is None:
                break
            descendant = source
            if descendant.id == incarnation:
                if shared:
                    return
                raise InvalidOffset(
                    f"Offset {offset} of {descendant.name!r} is after the fork point of {stream.name!r}; use an offset"
                    f" that a read of {stream.name!r} returned."
                )
        raise stream_recreated(stream.name, stream.id, incarnation)

    def generation(self, stream: LiveStream) -> int:
        """The number of sources above a stream."""
        return self._lineages.of(stream).generation

    def fork_point(self, source: LiveStream, requested: ForkRequest) -> ForkPoint:
        """Where a fork begins: at an offset, plus some messages of a JSON stream or some bytes of a message."""
        start = self.resolve(source, requested.offset if requested.offset is not None else NOW)
        message_index, byte_position = start.message_index, start.byte_position
        if requested.sub_offset:
            if source.type.json:
                message_index += requested.sub_offset
                after = self.boundary(source, message_index) if message_index <= source.durable_index else None
                if after is None:
                    raise InvalidOffset(
                        f"There are fewer than {requested.sub_offset} messages after the fork offset; send a smaller"
                        " Stream-Fork-Sub-Offset."
                    )
                byte_position = after
            else:
                message_index += 1
                after = self.boundary(source, message_index) if message_index <= source.durable_index else None
                byte_position += requested.sub_offset
                if after is None or byte_position > after:
                    raise InvalidOffset(
                        f"The message at the fork offset has fewer than {requested.sub_offset} bytes; send a smaller"
                        " Stream-Fork-Sub-Offset."
                    )
        return ForkPoint(source.id, source.name, message_index, byte_position, requested.offset, requested.sub_offset)

    def boundary(self, stream: LiveStream, message_index: int) -> int | None:
        """The byte position after `message_index` messages of the stream, also of inherited ones."""
        if message_index == stream.durable_index:
            return stream.durable_position
        if message_index <= stream.durable_retained_index:
            return stream.durable_retained_position if message_index == stream.durable_retained_index else None
        owner = self._lineages.owner(stream, message_index)
        if owner.fork is not None and message_index == owner.base_index:
            return owner.base_position
        return self._storage.boundary(owner.id, message_index)

    def chunk(self, stream: LiveStream, start: Offset, max_bytes: int) -> ReadChunk:
        """The messages from `start` that fit into `max_bytes`, at least one if there is one."""
        tail = Offset(stream.durable_index, stream.durable_position)
        end = tail
        spans: Sequence[IncarnationSpan] = ()
        if start.message_index < tail.message_index:
            spans = self._spans(stream, start, tail, max_bytes)
            end = spans[-1].end
        at_tail = end == tail
        return ReadChunk(stream, start, end, spans, at_tail, at_tail and stream.durable_closed)

    def run(self, stream: LiveStream, start: Offset, end: Offset, max_bytes: int) -> ReadChunk:
        """The same for a range that ends at `end`, regardless of later appends."""
        spans = self._spans(stream, start, end, max_bytes)
        return ReadChunk(stream, start, spans[-1].end, spans, up_to_date=False, closed=False)

    def check_readable(self, stream: LiveStream, start: Offset) -> None:
        """Refuse to continue from `start` if the stream was deleted or trimmed in the meantime."""
        if stream.id not in self._by_id:
            raise StreamNotFound(f"Stream {stream.name!r} was deleted while it was being read; discard its offsets.")
        if start.message_index < stream.durable_retained_index:
            raise gone_before(stream)

    def first_messages(self, stream: LiveStream, start: Offset, end: Offset, count: int) -> Offset:
        """The end of the first `count` messages of a range, or the end of the range if it has fewer."""
        if end.message_index - start.message_index <= count:
            return end
        byte_position = self.boundary(stream, start.message_index + count)
        assert byte_position is not None, "the range is durable"
        return Offset(start.message_index + count, byte_position)

    def buffers(self, chunk: ReadChunk) -> list[Buffer]:
        """The bytes of a chunk, in order."""
        pieces = (self._storage.read(id_, start.byte_position, end.byte_position) for id_, start, end in chunk.spans)
        return list(chain.from_iterable(pieces))

    def fetch(self, chunk: ReadChunk) -> None:
        """Load a chunk, so that it can be read later without waiting for an object store."""
        self.buffers(chunk)

    def slices(self, chunk: ReadChunk, *, waits: bool = False, size: int = SLICE_BYTES) -> Iterator[Buffer]:
        """The bytes of a chunk, read from storage in slices as the reader consumes them.

        The first slice is read now, so that damage at the beginning still results in an error response. A reader that
        `waits` gets a `Pending` if data is being fetched; for others that is an error.
        """
        slices = self._slices(chunk, waits=waits, size=size)
        first = tuple(islice(slices, 1))
        if first and type(first[0]) is Pending:
            raise first[0].miss
        return chain(first, slices)

    def _slices(self, chunk: ReadChunk, *, waits: bool, size: int) -> Iterator[Buffer]:
        for span in chunk.spans:
            byte_position = span.start.byte_position
            while byte_position < span.end.byte_position:
                until = min(byte_position + size, span.end.byte_position)
                owner = self._by_id.get(span.stream_id)
                if owner is None:
                    raise StreamNotFound(
                        f"Stream {chunk.stream.name!r} was deleted while it was being read; discard its offsets."
                    )
                if byte_position < owner.floor_position:
                    raise OffsetGone(
                        f"Stream {chunk.stream.name!r} was trimmed while it was being read; read its earliest offset"
                        " with HEAD."
                    )
                try:
                    pieces = self._storage.read(span.stream_id, byte_position, until)
                except ColdRead as miss:
                    if not waits:
                        raise
                    yield pending(miss)
                    continue
                yield from pieces
                byte_position = until

    def lengths(self, chunk: ReadChunk) -> list[int]:
        """The length of each message of a chunk."""
        lengths: list[int] = []
        for stream_id, start, end in chunk.spans:
            if start == end:
                continue
            if self._ends_within_message(stream_id, end):
                complete = (
                    self._storage.lengths(stream_id, start.message_index, end.message_index - 1)
                    if end.message_index - 1 > start.message_index
                    else ()
                )
                lengths.extend(complete)
                lengths.append(end.byte_position - start.byte_position - sum(complete))
            else:
                lengths.extend(self._storage.lengths(stream_id, start.message_index, end.message_index))
        return lengths

    def arrivals(self, chunk: ReadChunk) -> array[int]:
        """The arrival time of each message of a chunk, in milliseconds; 0 if it is unknown."""
        times = array("Q")
        for stream_id, start, end in chunk.spans:
            if start.message_index < end.message_index:
                for messages, at_ms in self._storage.arrivals(stream_id, start.message_index, end.message_index):
                    times.extend(repeat(at_ms, messages))
        return times

    def since(self, stream: LiveStream, at_ms: int) -> Offset:
        """The offset of the first message that arrived at `at_ms` or later; the tail if there is none.

        Messages of unknown time are not skipped, unless the marks of retention show that they arrived before.
        """
        if at_ms > stream.written_ms:
            return Offset(stream.durable_index, stream.durable_position)
        owner, message_index = stream, stream.durable_index
        while owner.fork is not None and at_ms <= owner.created_ms and owner.base_index > stream.durable_retained_index:
            # Its own messages arrived after its creation, and all earlier ones before that.
            message_index = min(message_index, owner.base_index)
            owner = self._lineages.of(owner).origin
        first = max(owner.base_index, owner.floor_index, stream.durable_retained_index)
        message_index = max(min(message_index, self._storage.first_since(owner.id, at_ms)), first)
        if (
            message_index > first
            and self._storage.arrivals(owner.id, message_index - 1, message_index)[0].at_ms == UNKNOWN_MS
        ):
            mark = stream.ages.last_until(at_ms - 1) if stream.ages is not None else None
            message_index = max(first, min(message_index, mark[0])) if mark is not None else first
        byte_position = self.boundary(stream, message_index)
        assert byte_position is not None, "the message is retained"
        return Offset(message_index, byte_position)

    def _spans(self, stream: LiveStream, start: Offset, end: Offset, max_bytes: int) -> list[IncarnationSpan]:
        """The run from `start` to `end`, or as much of it as fits into `max_bytes`, oldest incarnation first."""
        limit = start.byte_position + max_bytes
        fits = end.byte_position <= limit
        if not fits:
            # Skip incarnations that begin beyond the limit.
            stream, above = self._lineages.below(stream, limit)
            if above is not None:
                end = min(end, above.base)
        spans: list[IncarnationSpan] = []
        while start.message_index < stream.base_index:
            base = stream.base
            if base.message_index < end.message_index:
                spans.append(IncarnationSpan(stream.id, base, end))
            end = min(end, base)
            stream = self._lineages.of(stream).origin
        spans.append(IncarnationSpan(stream.id, start, end))
        spans.reverse()
        return spans if fits else self._cut(spans, max_bytes)

    def _cut(self, spans: Sequence[IncarnationSpan], max_bytes: int) -> list[IncarnationSpan]:
        """The leading spans that fit, the last of them cut at a message boundary."""
        kept: list[IncarnationSpan] = []
        left = max_bytes
        for span in spans:
            stream_id, start, end = span
            if end.byte_position - start.byte_position <= left:
                kept.append(span)
                left -= end.byte_position - start.byte_position
                continue
            # The last message of a span may be a part of a source's message: it is returned completely or not at all.
            last_complete = end.message_index - 1 if self._ends_within_message(stream_id, end) else end.message_index
            if last_complete == start.message_index:
                cut = end
            else:
                cut = Offset(
                    *self._storage.cut(stream_id, start.message_index, start.byte_position, last_complete, left)
                )
            if not kept or cut.byte_position - start.byte_position <= left:
                kept.append(IncarnationSpan(stream_id, start, cut))
            break
        return kept

    def _ends_within_message(self, stream_id: int, end: Offset) -> bool:
        owner = self._by_id[stream_id]
        if owner.fork is not None and end.message_index == owner.fork.message_index:
            return False
        return self._storage.boundary(stream_id, end.message_index) != end.byte_position


def gone_before(stream: LiveStream) -> OffsetGone:
    """The refusal for a reader whose offset is no longer retained."""
    return offset_gone(stream.id, earliest(stream))


def earliest(stream: LiveStream) -> Offset:
    """The earliest offset that readers may begin at."""
    return Offset(stream.durable_retained_index, stream.durable_retained_position)
