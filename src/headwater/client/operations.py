"""Protocol operations: build requests, retry them if that is safe, and interpret responses. No I/O.

Invariant: a request that is not idempotent is retried only if the server did not process it. Creates, closes, deletes,
reads and snapshots are idempotent; an append is idempotent if it has a `ProducerStamp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypedDict, Unpack
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from headwater.client.effects import Emit, HttpRequest, Operation, Policy, send
from headwater.client.errors import InvalidRequestError, MalformedResponseError
from headwater.client.http1 import Body, split_url
from headwater.client.results import (
    BEGINNING,
    AppendResult,
    Chunk,
    CreateResult,
    LastMessages,
    ProducerStamp,
    Range,
    Snapshot,
    StreamInfo,
    is_json,
    is_text,
    is_true,
    next_offset_of,
    ranges_of,
    split_frames,
    split_json,
    split_timed_frames,
)

JSON: Final = "application/json"
Message = Any
"""A message to append: bytes, text, or on a JSON stream any value that can be encoded as JSON."""

_SPLIT_FAN_OUT: Final = 64
_LAST_READ_BYTES: Final = 64 * 1024


class CreateOptions(TypedDict, total=False):
    """Options of a new stream: a TTL in seconds or an expiry time, whether it starts closed, its first content."""

    ttl_s: int | None
    expires_at: datetime | str | None
    closed: bool
    body: bytes
    headers: Mapping[str, str] | None


class ForkOptions(TypedDict, total=False):
    """Options of a fork: the offset where it starts to differ, messages or bytes after that, and its lifetime."""

    offset: str | None
    sub_offset: int | None
    ttl_s: int | None
    expires_at: datetime | str | None


class AppendOptions(TypedDict, total=False):
    """Options of an append: close the stream after it, `Stream-Seq`, producer headers, and other headers."""

    close: bool
    seq: str | None
    producer: ProducerStamp | None
    headers: Mapping[str, str] | None


class StreamOperations:
    """One stream, by its URL."""

    __slots__ = ("content_type", "policy", "url")

    def __init__(self, url: str, policy: Policy, content_type: str | None = None) -> None:
        split_url(url)
        self.url = url.rstrip("/")
        self.policy = policy
        self.content_type = content_type
        """None until it is known; `create` and `head` set it."""

    # -- the stream itself -------------------------------------------------------------------------------------------

    def create(
        self,
        content_type: str,
        *,
        ttl_s: int | None = None,
        expires_at: datetime | str | None = None,
        closed: bool = False,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Operation[CreateResult]:
        wanted = {"Content-Type": content_type, **_lifetime(ttl_s, expires_at), **(headers or {})}
        if closed:
            wanted["Stream-Closed"] = "true"
        response = yield from self._send("PUT", 200, 201, headers=wanted, body=body)
        self.content_type = content_type
        return CreateResult(response.status == 201, next_offset_of(response))

    def fork_from(
        self,
        source_url: str,
        *,
        offset: str | None = None,
        sub_offset: int | None = None,
        ttl_s: int | None = None,
        expires_at: datetime | str | None = None,
    ) -> Operation[CreateResult]:
        """Create this stream as a fork of another stream on the same server."""
        headers = {"Stream-Forked-From": urlsplit(source_url).path, **_lifetime(ttl_s, expires_at)}
        if offset is not None:
            headers["Stream-Fork-Offset"] = offset
        if sub_offset is not None:
            headers["Stream-Fork-Sub-Offset"] = str(sub_offset)
        response = yield from self._send("PUT", 200, 201, headers=headers)
        return CreateResult(response.status == 201, next_offset_of(response))

    def head(self) -> Operation[StreamInfo]:
        info = StreamInfo.of((yield from self._send("HEAD", 200)))
        self.content_type = info.content_type
        return info

    def known_content_type(self) -> Operation[str]:
        if self.content_type is None:
            yield from self.head()
        assert self.content_type is not None
        return self.content_type

    def delete(self, *, missing_ok: bool = False) -> Operation[None]:
        """Delete the stream. A retry after a lost response may find no stream, which is not an error."""
        expected = (200, 204, 404) if missing_ok else (200, 204)
        yield from self._send("DELETE", *expected)

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, message: Message, **options: Unpack[AppendOptions]) -> Operation[AppendResult]:
        content_type = yield from self.known_content_type()
        return (yield from self.append_body(encode_message(message, content_type), **options))

    def append_many(self, messages: Iterable[Message], **options: Unpack[AppendOptions]) -> Operation[AppendResult]:
        content_type = yield from self.known_content_type()
        encoded = [encode_message(message, content_type, alone=False) for message in messages]
        if not encoded:
            raise InvalidRequestError("there are no messages to append")
        return (yield from self.append_body(join_messages(encoded, content_type), **options))

    def append_body(
        self,
        body: bytes,
        *,
        producer: ProducerStamp | None = None,
        seq: str | None = None,
        close: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Operation[AppendResult]:
        """Append an encoded request body: on a JSON stream one message, or an array of messages."""
        wanted: dict[str, str] = {}
        if body:
            wanted["Content-Type"] = self.content_type or (yield from self.known_content_type())
        if producer is not None:
            wanted |= producer.headers
        if seq is not None:
            wanted["Stream-Seq"] = seq
        if close:
            wanted["Stream-Closed"] = "true"
        if headers:
            wanted |= headers
        request = HttpRequest("POST", self.url, "", wanted, body)
        # Closing twice has no effect.
        idempotent = producer is not None or not body
        response = yield from send(self.policy, request, 200, 204, idempotent=idempotent)
        answer = response.headers
        return AppendResult(
            answer.get("stream-next-offset", ""),
            producer is not None and response.status == 204 and bool(body),
            answer.get("producer-digest"),
            is_true(answer, "stream-closed"),
        )

    def close(self) -> Operation[AppendResult]:
        return self.append_body(b"", close=True)

    # -- bounded reads -----------------------------------------------------------------------------------------------

    def read_chunk(self, offset: str, until: str | None = None) -> Operation[Chunk]:
        """One catch-up read: from an offset to wherever the server ends its response."""
        query = {"offset": offset} if until is None else {"offset": offset, "until": until}
        return Chunk.of((yield from self._send("GET", 200, query=query)))

    def read_frames(self, offset: str, until: str, *, times: bool = False) -> Operation[Chunk]:
        """One read with message boundaries, and arrival times if `times`, never beyond `until` (extension `frames`)."""
        query = {"offset": offset, "until": until, "frames": "1"}
        if times:
            query["times"] = "1"
        response = yield from self._send("GET", 200, query=query)
        if times and "stream-frame-times" not in response.headers:
            raise MalformedResponseError("the server does not store when messages arrived")
        return Chunk.of(response)

    def offset_at(self, since: datetime | str | int) -> Operation[str]:
        """The offset of the first message that arrived at a time or later (extension `since`)."""
        response = yield from self._send("HEAD", 200, query={"since": _time(since)})
        found: str | None = response.headers.get("stream-since-offset")
        if found is None:
            raise MalformedResponseError("the server cannot find the offset of a time")
        return found

    def splits(self, start: str, end: str, count: int) -> Operation[list[Range]]:
        """Split a range into about `count` parts of the same size (extension `splits`)."""
        query = {"offset": start, "until": end, "splits": str(count)}
        return ranges_of((yield from self._send("GET", 200, query=query)).body)

    def messages_between(self, start: str, end: str) -> Operation[list[bytes]]:
        """All messages between two offsets, one by one (extension `frames`)."""
        found: list[bytes] = []
        while start != end:
            chunk = yield from self.read_frames(start, end)
            found += split_frames(chunk.body, json=is_json(chunk.content_type))
            if chunk.next_offset == start:
                break
            start = chunk.next_offset
        return found

    def timed_messages(self, start: str) -> Operation[None]:
        """Emit the messages from an offset to the current end, each with its arrival time (extension `times`)."""
        end = (yield from self.head()).next_offset
        while start != end:
            chunk = yield from self.read_frames(start, end, times=True)
            for message in split_timed_frames(chunk.body, json=is_json(chunk.content_type)):
                yield Emit(message)
            if chunk.next_offset == start:
                return
            start = chunk.next_offset

    def last(self, count: int) -> Operation[LastMessages]:
        """The last messages. On servers without message boundaries, this reads the whole stream."""
        info = yield from self.head()
        if count < 1:
            return LastMessages([], info.next_offset)
        start = info.earliest_offset or info.snapshot_offset or BEGINNING
        if info.position is not None and {"splits", "frames"} <= info.extensions:
            if info.position == 0:
                return LastMessages([], info.next_offset)
            start = yield from self._start_of_last(start, info.next_offset, info.position - count)
            messages = yield from self.messages_between(start, info.next_offset)
            return LastMessages(messages[-count:], info.next_offset)
        found: list[bytes] = []
        while True:
            chunk = yield from self.read_chunk(start)
            if chunk.body:
                found += split_json(chunk.body) if is_json(chunk.content_type) else [chunk.body]
                del found[:-count]
            if chunk.up_to_date or chunk.next_offset == start:
                return LastMessages(found, chunk.next_offset)
            start = chunk.next_offset

    def _start_of_last(self, start: str, end: str, first_position: int) -> Operation[str]:
        """A message boundary at or shortly before the message with this index."""
        until = end
        while True:
            ranges = yield from self.splits(start, until, _SPLIT_FAN_OUT)
            holding = next((part for part in ranges if part.end_position > first_position), None)
            if holding is None:
                return start
            if holding.bytes <= _LAST_READ_BYTES or holding.end_position - holding.start_position <= 1:
                return holding.start
            start, until = holding.start, holding.end

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def publish_snapshot(self, offset: str, body: Body, content_type: str) -> Operation[None]:
        """Publish the state after all messages before `offset`. The body may be an iterable of pieces."""
        request = HttpRequest(
            "PUT", f"{self.url}/snapshot/{quote(offset, safe='')}", "", {"Content-Type": content_type}, body
        )
        # Pieces can be consumed only once, so the request cannot be retried.
        yield from send(self.policy, request, 204, idempotent=isinstance(body, bytes))

    def snapshot(self, offset: str | None = None) -> Operation[Snapshot]:
        """The latest snapshot, or the one at an offset."""
        at = "" if offset is None else f"/{quote(offset, safe='')}"
        response = yield from send(self.policy, HttpRequest("GET", f"{self.url}/snapshot{at}"), 200)
        found = response.headers.get("stream-snapshot-offset") or offset
        if found is None:
            found = (yield from self.head()).snapshot_offset or BEGINNING
        return Snapshot(found, response.headers.get("content-type", "application/octet-stream"), response.body)

    def _send(
        self,
        method: str,
        *expected: int,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Operation[Any]:
        request = HttpRequest(method, self.url, urlencode(query) if query else "", headers or {}, body)
        return send(self.policy, request, *expected)


def encode_message(message: Message, content_type: str, *, alone: bool = True) -> bytes:
    """Encode one message. `alone`: as a request body, in which the server would split an array."""
    if is_json(content_type):
        encoded = message if isinstance(message, bytes) else encode_json(message)
        return b"[" + encoded + b"]" if alone and encoded.lstrip()[:1] == b"[" else encoded
    if isinstance(message, str):
        return message.encode()
    if isinstance(message, bytes | bytearray | memoryview):
        return bytes(message)
    kind = "text or bytes" if is_text(content_type) else "bytes or text"
    raise InvalidRequestError(f"a message of a {content_type} stream must be {kind}, not {type(message).__name__}")


def join_messages(encoded: list[bytes], content_type: str) -> bytes:
    """One request body for several messages. Streams other than JSON have no message boundaries in a request."""
    return b"[" + b",".join(encoded) + b"]" if is_json(content_type) else b"".join(encoded)


def encode_json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(f"the message cannot be encoded as JSON: {error}") from None


def _time(value: datetime | str | int) -> str:
    """A time as query text, from a `datetime`, RFC 3339 text, or milliseconds since 1970."""
    if not isinstance(value, datetime):
        return str(value)
    if value.tzinfo is None:
        raise InvalidRequestError("a time needs a time zone")
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _lifetime(ttl_s: int | None, expires_at: datetime | str | None) -> dict[str, str]:
    if ttl_s is not None and expires_at is not None:
        raise InvalidRequestError("a stream can have a TTL or an expiry time, not both")
    if ttl_s is not None:
        return {"Stream-TTL": str(ttl_s)}
    if isinstance(expires_at, datetime):
        return {"Stream-Expires-At": _time(expires_at)}
    return {"Stream-Expires-At": expires_at} if expires_at is not None else {}
