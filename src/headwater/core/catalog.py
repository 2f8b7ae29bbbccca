"""The catalog: the state of every stream except its bytes, and the one function that changes it.

`Catalog.apply(record)` is total and deterministic: the same records in the same order give the same catalog, which
is all that recovery needs. It does not decide anything: `rules` decides what is allowed before a record exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, Generic, TypeVar

from headwater.core.content import JSON_MEDIA_TYPE, is_text, media_type
from headwater.core.expiry import deadline_ms
from headwater.core.offsets import Offset
from headwater.core.producers import ProducerState, dated, remember
from headwater.core.records import (
    AgeIndex,
    Append,
    Create,
    Delete,
    Document,
    Evict,
    ForkPoint,
    Image,
    Record,
    Retain,
    Touch,
)
from headwater.core.retention import STEP_MIN_MS, AgeMarks


class ContentType:
    """A content type with its parsed properties, computed once and shared between streams."""

    __slots__ = ("header", "json", "media", "text")

    def __init__(self, header: str) -> None:
        self.header: Final = header
        self.media: Final = media_type(header)
        self.json: Final = self.media == JSON_MEDIA_TYPE
        self.text: Final = is_text(header)


content_type_of = lru_cache(maxsize=1024)(ContentType)


class StreamState:
    """One incarnation of a stream. `message_index` and `byte_position` are its tail."""

    __slots__ = (
        "accessed_ms",
        "ages",
        "base_index",
        "base_position",
        "byte_position",
        "children",
        "closed",
        "closed_by",
        "created_ms",
        "deleted",
        "expires_at_ms",
        "fork",
        "id",
        "message_index",
        "mortal",
        "name",
        "producers",
        "retained_index",
        "retained_position",
        "retention",
        "snapshot",
        "stream_seq",
        "ttl_secs",
        "type",
        "written_ms",
    )

    def __init__(self, image: Image) -> None:
        self.id: Final = image.id
        self.name: Final = image.name
        self.created_ms: Final = image.created_ms
        self.type: Final[ContentType] = content_type_of(image.content_type)
        self.ttl_secs: Final = image.ttl_secs
        self.expires_at_ms: Final = image.expires_at_ms
        self.mortal: Final = image.ttl_secs is not None or image.expires_at_ms is not None
        self.fork: Final[ForkPoint | None] = image.fork
        # Where the stream's own data begins; a fork shares what is before with its source.
        self.base_index: Final = image.fork.message_index if image.fork is not None else 0
        self.base_position: Final = image.fork.byte_position if image.fork is not None else 0
        self.message_index = image.message_index
        self.byte_position = image.byte_position
        self.accessed_ms = image.accessed_ms
        self.written_ms = image.written_ms
        self.closed = image.closed
        self.closed_by = image.closed_by
        self.stream_seq = image.stream_seq
        self.producers: dict[str, ProducerState] | None = dated(image.producers, image.written_ms) or None
        self.retained_index = image.retained_index
        self.retained_position = image.retained_position
        self.snapshot = image.snapshot
        self.retention: Final = image.retention
        self.ages = AgeMarks(image.ages) if image.ages is not None else None
        self.children = 0
        self.deleted = image.deleted

    @property
    def tail(self) -> Offset:
        return Offset(self.message_index, self.byte_position)

    @property
    def retained(self) -> Offset:
        """The earliest offset that can still be read."""
        return Offset(self.retained_index, self.retained_position)

    @property
    def base(self) -> Offset:
        return Offset(self.base_index, self.base_position)

    def deadline_ms(self) -> int | None:
        return deadline_ms(self.ttl_secs, self.expires_at_ms, self.accessed_ms)

    def expired(self, now_ms: int) -> bool:
        deadline = self.deadline_ms()
        return deadline is not None and now_ms >= deadline

    def image(self) -> Image:
        return Image(
            self.id,
            self.name,
            self.created_ms,
            self.type.header,
            self.ttl_secs,
            self.expires_at_ms,
            self.message_index,
            self.byte_position,
            self.accessed_ms,
            self.written_ms,
            self.closed,
            self.closed_by,
            self.stream_seq,
            dict(self.producers or {}),
            self.fork,
            self.deleted,
            self.retained_index,
            self.retained_position,
            self.snapshot,
            self.retention,
            self.ages.saved() if self.ages is not None else None,
        )


StreamT = TypeVar("StreamT", bound=StreamState)


class Catalog(Generic[StreamT]):
    """All streams, by name and by incarnation. A deleted stream that forks still need is kept under both."""

    def __init__(self, make_stream: Callable[[Image], StreamT]) -> None:
        self._make_stream = make_stream
        self.by_name: dict[str, StreamT] = {}
        self.by_id: dict[int, StreamT] = {}
        self.documents: dict[str, bytes] = {}
        self._orphans: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[StreamT]:
        return iter(self.by_id.values())

    def apply(self, record: Record) -> tuple[int, ...]:
        """Apply a record to the state; returns the incarnations whose bytes can be removed."""
        if type(record) is Append:
            apply_append(self.by_id[record.id], record)
        elif type(record) is Touch:
            stream = self.by_id[record.id]
            stream.accessed_ms = max(stream.accessed_ms, record.at_ms)
        elif type(record) is Create:
            self._create(record)
        elif type(record) is Delete:
            return self._delete(self.by_id[record.id])
        elif type(record) is Image:
            self._install(record)
        elif type(record) is Document:
            if record.value is None:
                self.documents.pop(record.key, None)
            else:
                self.documents[record.key] = record.value
        elif type(record) is Retain:
            self._retain(self.by_id[record.id], record)
        elif type(record) is Evict:
            producers = self.by_id[record.id].producers or {}
            for producer_id in record.producer_ids:
                producers.pop(producer_id, None)
        else:
            raise AssertionError(f"no rule to apply {record!r}")
        return ()

    def _create(self, record: Create) -> None:
        fork = record.fork
        message_index = (fork.message_index if fork is not None else 0) + len(record.lengths)
        byte_position = (fork.byte_position if fork is not None else 0) + len(record.payload)
        self._install(
            Image(
                record.id,
                record.name,
                record.at_ms,
                record.content_type,
                record.ttl_secs,
                record.expires_at_ms,
                message_index,
                byte_position,
                record.at_ms,
                record.at_ms,
                record.closed,
                fork=fork,
                retained_index=record.retained_index,
                retained_position=record.retained_position,
                snapshot=record.snapshot,
                retention=record.retention,
                ages=AgeIndex(STEP_MIN_MS) if record.tracks_age else None,
            )
        )

    def _retain(self, stream: StreamState, record: Retain) -> None:
        stream.retained_index = record.message_index
        stream.retained_position = record.byte_position
        if record.snapshot is not None:
            stream.snapshot = record.snapshot
            stream.accessed_ms = max(stream.accessed_ms, record.at_ms)
        elif stream.snapshot is not None and stream.snapshot.message_index < record.message_index:
            # There is now a gap between the snapshot and what is retained, so it must not be served.
            stream.snapshot = None
        if record.tracks_age and stream.ages is None:
            stream.ages = AgeMarks(
                AgeIndex(STEP_MIN_MS, ((stream.written_ms, stream.message_index, stream.byte_position),))
            )
        if stream.ages is not None:
            stream.ages.forget(record.message_index)

    def _install(self, image: Image) -> None:
        stream = self._make_stream(image)
        self.by_id[stream.id] = stream
        self.by_name[stream.name] = stream
        if stream.fork is not None:
            # A checkpoint may list a fork before its source. The source then counts the forks that were listed before.
            source = self.by_id.get(stream.fork.source_id)
            if source is not None:
                source.children += 1
            else:
                self._orphans[stream.fork.source_id] = self._orphans.get(stream.fork.source_id, 0) + 1
        stream.children += self._orphans.pop(stream.id, 0)

    def _delete(self, stream: StreamT) -> tuple[int, ...]:
        if stream.children:
            stream.deleted = True
            return ()
        gone = []
        current: StreamT | None = stream
        while current is not None:
            del self.by_id[current.id]
            if self.by_name.get(current.name) is current:
                del self.by_name[current.name]
            gone.append(current.id)
            source = self.by_id.get(current.fork.source_id) if current.fork is not None else None
            if source is None:
                break
            source.children -= 1
            current = source if source.deleted and not source.children else None
        return tuple(gone)


def apply_plain_append(stream: StreamState, messages: int, size: int, at_ms: int) -> None:
    """Apply an append that has only data, to a stream that does not record the ages of its messages (`ages`)."""
    stream.message_index += messages
    stream.byte_position += size
    stream.accessed_ms = stream.written_ms = at_ms


def apply_append(stream: StreamState, record: Append) -> None:
    """Apply an append to its stream: what `Catalog.apply` does, if the stream is known already."""
    if record.message_index != stream.message_index or record.byte_position != stream.byte_position:
        raise AssertionError(
            f"append at {record.message_index}_{record.byte_position} to {stream.name!r} at {stream.tail}"
        )
    if stream.ages is not None:
        stream.ages.note(record.at_ms, stream.written_ms, stream.message_index, stream.byte_position)
    apply_plain_append(stream, len(record.lengths), len(record.payload), record.at_ms)
    if record.producer_id is not None:
        if stream.producers is None:
            stream.producers = {}
        known = stream.producers.get(record.producer_id)
        stream.producers[record.producer_id] = remember(known, record.epoch, record.seq, record.digest, record.at_ms)
    if record.stream_seq is not None:
        stream.stream_seq = record.stream_seq
    if record.close:
        stream.closed = True
        if record.producer_id is not None:
            stream.closed_by = (record.producer_id, record.epoch, record.seq)
