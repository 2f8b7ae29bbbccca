"""Records: everything that can happen to a stream, one type each.

A record contains everything that it changes (data, producer state, closure), so a crash can never split them. The
journal stores records, recovery replays them, and `Catalog.apply` takes nothing else. A stream is named by the
random id of its incarnation, so that deleting and re-creating a name never mixes two incarnations.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from headwater.core.producers import ProducerState


class ForkPoint(msgspec.Struct, frozen=True, array_like=True):
    """The fork point in the source. The fork's own data begins at (message_index, byte_position)."""

    source_id: int
    source_name: str
    message_index: int
    byte_position: int
    requested_offset: str | None = None
    requested_sub_offset: int = 0


class SnapshotRef(msgspec.Struct, frozen=True, array_like=True):
    """The latest snapshot of a stream: what it covers, and where its bytes are kept."""

    message_index: int
    byte_position: int
    content_type: str
    blob_id: int
    size: int
    at_ms: int


class RetentionPolicy(msgspec.Struct, frozen=True, array_like=True):
    """A stream's own retention rule; None uses the server's value, 0 keeps all."""

    max_age_secs: int | None = None
    max_bytes: int | None = None
    may_drop: bool | None = None


class AgeIndex(msgspec.Struct, frozen=True, array_like=True):
    """Marks (millisecond, message_index, byte_position): messages before it were appended at that time or earlier."""

    step_ms: int
    marks: tuple[tuple[int, int, int], ...] = ()


class Create(msgspec.Struct, frozen=True, array_like=True, tag="create"):
    id: int
    name: str
    at_ms: int
    content_type: str
    ttl_secs: int | None = None
    expires_at_ms: int | None = None
    closed: bool = False
    payload: bytes = b""
    lengths: tuple[int, ...] = ()
    fork: ForkPoint | None = None
    retained_index: int = 0
    retained_position: int = 0
    """Of a fork: the earliest offset that its source retained when it was created."""
    snapshot: SnapshotRef | None = None
    """Of a fork: the source's snapshot, which covers the messages before the earliest offset."""
    retention: RetentionPolicy | None = None
    tracks_age: bool = False


class Append(msgspec.Struct, frozen=True, array_like=True, tag="append"):
    """Messages added at (message_index, byte_position), with the producer and the closure of the same request.

    An append without messages is a plain close.
    """

    id: int
    at_ms: int
    message_index: int
    byte_position: int
    payload: bytes
    lengths: tuple[int, ...]
    producer_id: str | None = None
    epoch: int = 0
    seq: int = 0
    stream_seq: str | None = None
    close: bool = False
    digest: int = 0
    """Of the body that a producer sent (see `producers.digest`)."""


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """The end of a stream, on request or by expiry. With forks it is kept, invisible, until the last fork is gone."""

    id: int
    at_ms: int
    expired: bool = False


class Touch(msgspec.Struct, frozen=True, array_like=True, tag="touch"):
    """A use that restarts a sliding TTL window and changes nothing else."""

    id: int
    at_ms: int


class Retain(msgspec.Struct, frozen=True, array_like=True, tag="retain"):
    """The earliest retained offset moves forward, with the snapshot that covers what is dropped, if there is one."""

    id: int
    at_ms: int
    message_index: int
    byte_position: int
    snapshot: SnapshotRef | None = None
    tracks_age: bool = False
    """From now on the stream records when its messages were appended."""


class Evict(msgspec.Struct, frozen=True, array_like=True, tag="evict"):
    """Removal of producers that have been idle for a long time, to make room for others."""

    id: int
    at_ms: int
    producer_ids: tuple[str, ...]


class Document(msgspec.Struct, frozen=True, array_like=True, tag="document"):
    """A small value under a key, beside the streams: a bucket, a subscription, its cursors. None removes it."""

    key: str
    value: bytes | None


class Image(msgspec.Struct, frozen=True, array_like=True, tag="image"):
    """The complete state of one stream except its bytes: what a checkpoint saves and recovery starts from."""

    id: int
    name: str
    created_ms: int
    content_type: str
    ttl_secs: int | None
    expires_at_ms: int | None
    message_index: int
    byte_position: int
    accessed_ms: int
    written_ms: int
    closed: bool = False
    closed_by: tuple[str, int, int] | None = None
    stream_seq: str | None = None
    producers: dict[str, ProducerState] = {}
    fork: ForkPoint | None = None
    deleted: bool = False
    retained_index: int = 0
    retained_position: int = 0
    snapshot: SnapshotRef | None = None
    retention: RetentionPolicy | None = None
    ages: AgeIndex | None = None


Record: TypeAlias = Create | Append | Delete | Touch | Retain | Evict | Document | Image

encode_record = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(Record).decode
