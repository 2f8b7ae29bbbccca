"""The results of requests: plain values, parsed from the headers and bodies of responses. No I/O."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import msgspec

from headwater.client.errors import MalformedResponseError
from headwater.client.http1 import HttpResponse

BEGINNING: Final = "-1"
"""The offset of the first message."""
NOW: Final = "now"
"""The offset after the last message at the time when the server processes the request."""

_elements: Final = msgspec.json.Decoder(list[msgspec.Raw])
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_values: Final = msgspec.json.Decoder(list[Any])
any_json: Final = msgspec.json.Decoder(Any)
any_object: Final = msgspec.json.Decoder(dict[str, Any])
DecodedT = TypeVar("DecodedT")
_JSON: Final = re.compile(r"\s*application/json\s*(;.*)?", re.IGNORECASE)


def is_json(content_type: str) -> bool:
    return _JSON.fullmatch(content_type) is not None


def is_text(content_type: str) -> bool:
    return content_type.lstrip().lower().startswith("text/")


def split_json(array: bytes) -> list[bytes]:
    """The elements of a JSON array, unparsed."""
    return [bytes(element) for element in _decoded(_elements, array)]


def _decoded(decoder: msgspec.json.Decoder[list[DecodedT]], array: bytes) -> list[DecodedT]:
    try:
        return decoder.decode(array)
    except msgspec.MsgspecError as error:
        raise MalformedResponseError(f"a batch is not a JSON array: {error}") from None


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """A message and its arrival time."""

    data: bytes
    at: datetime | None
    """None for messages that were stored before the server recorded times."""


def split_timed_frames(body: bytes, *, json: bool) -> list[TimedMessage]:
    """Split frames with times into messages."""
    messages = split_frames(body, json=json, skip=8)
    times = struct.unpack_from(f"<{len(messages)}Q", body, 4 + 4 * len(messages))
    return [
        TimedMessage(message, _EPOCH + timedelta(milliseconds=at_ms) if at_ms else None)
        for message, at_ms in zip(messages, times, strict=True)
    ]


def split_frames(body: bytes, *, json: bool, skip: int = 0) -> list[bytes]:
    """Split a body of type `application/vnd.headwater.frames`; `skip` bytes per message follow the lengths."""
    (count,) = struct.unpack_from("<I", body) if len(body) >= 4 else (-1,)
    start = 4 + (4 + skip) * count
    if count < 0 or start > len(body):
        raise MalformedResponseError("the frames of a read are truncated")
    lengths = struct.unpack_from(f"<{count}I", body, 4)
    if start + sum(lengths) != len(body):
        raise MalformedResponseError("the frames of a read do not have the length of the body")
    found: list[bytes] = []
    for length in lengths:
        # Stored JSON messages are followed by a comma.
        found.append(body[start : start + length - json])
        start += length
    return found


def decode_base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text.replace(b"\n", b""), validate=True)
    except ValueError as error:
        raise MalformedResponseError(f"an event is not base64: {error}") from None


def digest_of(body: bytes) -> str:
    """The digest of an append, as servers with the extension send it in `Producer-Digest`."""
    return f"crc32:{zlib.crc32(body):08x}:{len(body)}"


def next_offset_of(response: HttpResponse) -> str:
    offset = response.headers.get("stream-next-offset")
    if offset is None:
        raise MalformedResponseError("the response has no Stream-Next-Offset; is this a Durable Streams server?")
    return offset


def is_true(headers: Mapping[str, str], name: str) -> bool:
    return headers.get(name, "").lower() == "true"


def number(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The metadata of a stream from HEAD. Fields that the server does not send are None."""

    content_type: str
    next_offset: str
    closed: bool
    position: int | None
    """How many messages the stream has had (an extension of Headwater)."""
    ttl_s: int | None
    expires_at: str | None
    snapshot_offset: str | None
    earliest_offset: str | None
    """The first offset that can still be read, if retention dropped earlier messages."""
    extensions: frozenset[str]
    headers: Mapping[str, str]

    @classmethod
    def of(cls, response: HttpResponse) -> StreamInfo:
        headers = response.headers
        return cls(
            headers.get("content-type", "application/octet-stream"),
            next_offset_of(response),
            is_true(headers, "stream-closed"),
            number(headers, "stream-next-position"),
            number(headers, "stream-ttl"),
            headers.get("stream-expires-at"),
            headers.get("stream-snapshot-offset"),
            headers.get("stream-earliest-offset"),
            frozenset(name for part in headers.get("stream-extensions", "").split(",") if (name := part.strip())),
            headers,
        )

    @property
    def is_json(self) -> bool:
        return is_json(self.content_type)


@dataclass(frozen=True, slots=True)
class CreateResult:
    created: bool
    """False if the stream existed with the same configuration."""
    next_offset: str


@dataclass(frozen=True, slots=True)
class AppendResult:
    next_offset: str
    """The offset after the appended data; empty if the server does not send it (some duplicates)."""
    duplicate: bool = False
    """Whether the server had already stored this append of the producer."""
    digest: str | None = None
    """For a duplicate: the digest of the stored body, see `digest_of`."""
    closed: bool = False


@dataclass(frozen=True, slots=True)
class ProducerStamp:
    """The three headers that make an append idempotent."""

    producer_id: str
    epoch: int
    seq: int

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Producer-Id": self.producer_id,
            "Producer-Epoch": str(self.epoch),
            "Producer-Seq": str(self.seq),
        }


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response to a catch-up read."""

    content_type: str
    body: bytes
    next_offset: str
    up_to_date: bool
    closed: bool

    @classmethod
    def of(cls, response: HttpResponse) -> Chunk:
        headers = response.headers
        return cls(
            headers.get("stream-content-type") or headers.get("content-type", "application/octet-stream"),
            response.body,
            next_offset_of(response),
            is_true(headers, "stream-up-to-date"),
            is_true(headers, "stream-closed"),
        )


class Batch:
    """Some messages of a stream, and the offset after them.

    A batch of a JSON stream holds the received arrays; they are split or decoded when they are used. Catch-up reads of
    other streams have no message boundaries: each received piece counts as one message.
    """

    __slots__ = ("bodies", "closed", "content_type", "cursor", "is_json", "next_offset", "position", "up_to_date")

    def __init__(
        self,
        bodies: list[bytes],
        content_type: str,
        next_offset: str,
        *,
        up_to_date: bool,
        closed: bool,
        cursor: str | None = None,
        position: int | None = None,
    ) -> None:
        self.bodies = bodies
        """The received JSON arrays, or messages of other types."""
        self.content_type = content_type
        self.is_json = is_json(content_type)
        self.next_offset = next_offset
        self.up_to_date = up_to_date or closed
        self.closed = closed
        self.cursor = cursor
        self.position = position
        """How many messages are before `next_offset`, if the server sends it."""

    @property
    def messages(self) -> list[bytes]:
        """The messages as bytes; JSON unparsed."""
        if not self.is_json:
            return self.bodies
        return [message for body in self.bodies for message in split_json(body)]

    @property
    def values(self) -> list[Any]:
        """The messages decoded: JSON values, or bytes."""
        if not self.is_json:
            return self.bodies
        if len(self.bodies) == 1:
            return _decoded(_values, self.bodies[0])
        return [value for body in self.bodies for value in _decoded(_values, body)]


@dataclass(frozen=True, slots=True)
class LastMessages:
    """The last messages of a stream as bytes, and the offset after them."""

    messages: list[bytes]
    next_offset: str


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a stream between two message boundaries (extension `splits`)."""

    start: str
    end: str
    start_position: int
    end_position: int
    bytes: int


class _Splits(msgspec.Struct):
    ranges: list[Range]


_splits: Final = msgspec.json.Decoder(_Splits)


def ranges_of(body: bytes) -> list[Range]:
    return decode(body, _splits).ranges


def decode(body: bytes, decoder: msgspec.json.Decoder[DecodedT]) -> DecodedT:
    """Decode a JSON document from the server."""
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise MalformedResponseError(f"a JSON body of the server is malformed: {error}") from None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after all messages before `offset`."""

    offset: str
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BootstrapInfo:
    """The head of a bootstrap: a snapshot, then the messages after it."""

    snapshot_offset: str
    """`-1` if there is no snapshot; the first part is then empty."""
    next_offset: str
    closed: bool
    position: int | None
    missing_before: str | None
    """The offset before which messages are deleted and not covered by a snapshot; None if nothing is missing."""

    @property
    def has_snapshot(self) -> bool:
        return self.snapshot_offset != BEGINNING

    @classmethod
    def of(cls, response: HttpResponse) -> BootstrapInfo:
        headers = response.headers
        snapshot_offset = headers.get("stream-snapshot-offset")
        if snapshot_offset is None:
            raise MalformedResponseError("the bootstrap response does not have the offset of its snapshot")
        return cls(
            snapshot_offset,
            next_offset_of(response),
            is_true(headers, "stream-closed"),
            number(headers, "stream-next-position"),
            headers.get("stream-earliest-offset") if snapshot_offset == BEGINNING else None,
        )


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One stream in a listing. Fields that the server does not send are empty."""

    name: str
    next_offset: str = ""
    content_type: str = ""
    created_at_ms: int | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Everything that the server sent about it."""


@dataclass(frozen=True, slots=True)
class ChangedStreams:
    """Streams that changed after a cursor, each with its current tail or `deleted` in its attributes."""

    streams: list[StreamEntry]
    cursor: str
    """Where to continue."""
    has_more: bool
    reset: bool
    """The server does not know the cursor; list the streams again."""


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One bucket in a listing."""

    bucket_id: str
    streams: int = 0
    created_at_ms: int | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Everything that the server sent about it."""
