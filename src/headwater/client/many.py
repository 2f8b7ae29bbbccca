"""List many streams, and follow them over one connection. No I/O.

Following needs an extension of Headwater. Invariant: each message of each stream is emitted once, in the order of its
stream, including the existing messages of streams that are found or created later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from headwater.client.effects import Attempts, Emit, HttpRequest, Open, Operation, Policy, Receive, send
from headwater.client.errors import (
    ClientError,
    InvalidRequestError,
    ResponseError,
    StreamNotFoundError,
    StreamRecreatedError,
    error_of,
)
from headwater.client.http1 import HttpResponse
from headwater.client.listing import changed_streams, listed_streams, registered_streams, stream_url
from headwater.client.operations import JSON, StreamOperations, encode_json
from headwater.client.reading import SSE_TYPE, Position, check_sse, read
from headwater.client.results import BEGINNING, NOW, Batch, StreamEntry, any_object, decode, decode_base64, is_json
from headwater.client.sse import SseParser


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A batch of one of many streams."""

    name: str
    batch: Batch


def all_streams(policy: Policy, base_url: str, prefix: str) -> Operation[list[StreamEntry]]:
    """The streams with a prefix, from the listing of the server, or from its registry."""
    root = f"{base_url}/v1/stream"
    try:
        return (yield from _collected(listed_streams(policy, f"{root}/__ds/streams", prefix)))
    except ResponseError as error:
        if error.status not in {400, 404, 405}:
            raise
    return (yield from registered_streams(policy, root, prefix))


def follow_many(
    policy: Policy, base_url: str, prefix: str | None, offsets: Mapping[str, str] | None, start: str = BEGINNING
) -> Operation[None]:
    """Emit a `StreamBatch` for everything in the streams with a prefix, then for what is appended to any of them.

    `offsets` has, by name, where to continue in streams that were read before; others are read from `start`, and those
    that are created later from their beginning. Without a prefix, only the streams in `offsets` are followed, until all
    of them are closed.
    """
    if start not in {BEGINNING, NOW}:
        raise InvalidRequestError(f"start is {BEGINNING!r} or {NOW!r}, not {start!r}; an offset belongs to one stream")
    many = _Many(policy, base_url, prefix, dict(offsets or {}))
    yield from many.find_ends(start)
    attempts = Attempts(Policy(policy.follow_retry, on_retry=policy.on_retry, clock=policy.clock))
    while True:
        try:
            if (yield from many.follow(attempts)):
                return
            continue
        except ClientError as error:
            if isinstance(error, ResponseError):
                if error.code == "follow_not_found":
                    continue  # The id expired before it was used.
                if prefix is not None and error.status in _UNSUPPORTED:
                    break
            wait = attempts.failed(error)
        yield wait
    yield from _follow_by_listing(policy, base_url, prefix, many.offsets)


_UNSUPPORTED: Final = frozenset((404, 405, 501))
"""Statuses from servers that cannot follow many streams."""


class _Event(msgspec.Struct, rename="camel"):
    """A `data` event of a response over many streams."""

    stream: str
    content_type: str
    stream_next_offset: str
    up_to_date: bool = False
    stream_closed: bool = False
    encoding: str = ""
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    large: dict[str, str] | None = None


class _StreamProblem(msgspec.Struct):
    """A `problem` event: a stream that cannot be followed."""

    stream: str
    status: int
    code: str
    detail: str


_events: Final = msgspec.json.Decoder(_Event)
_problems: Final = msgspec.json.Decoder(_StreamProblem)
_texts: Final = msgspec.json.Decoder(list[str])


class _Many:
    """The offset up to which each stream was read."""

    def __init__(self, policy: Policy, base_url: str, prefix: str | None, offsets: dict[str, str]) -> None:
        self._policy = policy
        self._base_url = base_url
        self._url = f"{base_url}/v1/stream/__ds/follow"
        self._prefix = prefix
        self.offsets = offsets
        self._open = set(offsets)

    def find_ends(self, start: str) -> Operation[None]:
        """Replace `now` by offsets, so that nothing is skipped if the connection breaks before the first message."""
        for name, offset in self.offsets.items():
            if offset == NOW:
                try:
                    info = yield from StreamOperations(stream_url(self._base_url, name), self._policy).head()
                    self.offsets[name] = info.next_offset
                except StreamNotFoundError:
                    self.offsets[name] = BEGINNING
        if start == NOW and self._prefix is not None:
            listing_url = f"{self._base_url}/v1/stream/__ds/streams"
            for entry in (yield from _collected(listed_streams(self._policy, listing_url, self._prefix))):
                self.offsets.setdefault(entry.name, entry.next_offset)

    @property
    def _has_ended(self) -> bool:
        return self._prefix is None and not self._open

    def follow(self, attempts: Attempts) -> Operation[bool]:
        """Read the events of one response, from the offsets where the previous one ended.

        Returns whether all streams have ended.
        """
        body = encode_json({"streams": self.offsets, "prefix": self._prefix})
        request = HttpRequest("POST", self._url, "", {"Content-Type": JSON}, body)
        session = decode((yield from send(self._policy, request, 201)).body, any_object)
        events = HttpRequest(
            "GET",
            f"{self._url}/{session['id']}",
            headers={"Accept": SSE_TYPE},
            timeout_s=self._policy.live_timeout_s,
        )
        response: HttpResponse = yield Open(events)
        yield from check_sse(response, self._url)
        attempts.succeeded()
        parser = SseParser()
        while data := (yield Receive(response)):
            for event in parser.feed(data):
                if event.kind == "data":
                    yield from self._take(decode(event.data, _events))
                    if self._has_ended:
                        return True
                elif event.kind == "problem" and self._must_restart(decode(event.data, _problems)):
                    return False
        return False

    def _take(self, event: _Event) -> Operation[None]:
        stream_type, name = event.content_type, event.stream
        if event.large is not None:
            stream = StreamOperations(stream_url(self._base_url, name), self._policy, stream_type)
            bodies = yield from stream.messages_between(event.large["offset"], event.stream_next_offset)
            if is_json(stream_type):
                bodies = [b"[%b]" % body for body in bodies]
        elif is_json(stream_type):
            bodies = [bytes(event.messages)] if bytes(event.messages) != b"[]" else []
        else:
            texts = decode(bytes(event.messages), _texts)
            bodies = [decode_base64(text.encode()) if event.encoding else text.encode() for text in texts]
        self.offsets[name] = event.stream_next_offset
        if event.stream_closed:
            self._open.discard(name)
        if bodies:
            up_to_date, closed = event.up_to_date, event.stream_closed
            batch = Batch(bodies, stream_type, event.stream_next_offset, up_to_date=up_to_date, closed=closed)
            yield Emit(StreamBatch(name, batch))

    def _must_restart(self, problem: _StreamProblem) -> bool:
        """Whether the streams must be named again. Raises errors that the caller must handle."""
        if problem.code == "stream_recreated":
            self.offsets[problem.stream] = BEGINNING
            return True
        if problem.status == 404 or problem.code == "stream_deleted":
            # If it is created again, it is followed again.
            self.offsets[problem.stream] = BEGINNING
            return False
        raise error_of("GET", self._url, problem.status, {}, msgspec.json.encode(problem))


def _follow_by_listing(policy: Policy, base_url: str, prefix: str, offsets: dict[str, str]) -> Operation[None]:
    """Follow without the extension: one long-poll reports changed streams, which are then read."""
    listing_url = f"{base_url}/v1/stream/__ds/streams"
    many = _Listed(policy, base_url, offsets)
    patient = Policy(policy.follow_retry, on_retry=policy.on_retry, clock=policy.clock)
    cursor: str | None = None
    while True:
        if cursor is None:
            # Get the cursor first, so that the next response includes changes made during the listing.
            first = yield from changed_streams(policy, listing_url, prefix, None)
            entries = yield from _collected(listed_streams(policy, listing_url, prefix))
            yield from many.catch_up(entries)
            cursor = first.cursor if first is not None else None
            continue
        changed = yield from changed_streams(patient, listing_url, prefix, cursor)
        if changed is None:
            continue
        cursor = None if changed.reset else changed.cursor
        yield from many.catch_up(changed.streams)


class _Listed:
    """The offset up to which each stream was read."""

    def __init__(self, policy: Policy, base_url: str, offsets: dict[str, str]) -> None:
        self._policy = policy
        self._base_url = base_url
        self._offsets = offsets

    def catch_up(self, entries: list[StreamEntry]) -> Operation[None]:
        for entry in entries:
            if entry.attributes.get("deleted"):
                self._offsets.pop(entry.name, None)
            elif self._offsets.get(entry.name) != entry.next_offset:
                yield from self._read(entry.name)

    def _read(self, name: str) -> Operation[None]:
        operations = StreamOperations(stream_url(self._base_url, name), self._policy)

        def take(batch: Batch) -> StreamBatch | None:
            self._offsets[name] = batch.next_offset
            return StreamBatch(name, batch) if batch.bodies else None

        try:
            yield from read(operations, Position(self._offsets.get(name, BEGINNING)), take)
        except StreamRecreatedError:
            yield from read(operations, Position(BEGINNING), take)
        except StreamNotFoundError:
            # Deleted since it was listed; the listing will report that.
            self._offsets.pop(name, None)


def _collected(operation: Operation[None]) -> Operation[list[Any]]:
    """The values that an operation emits, as a list."""
    found: list[Any] = []
    try:
        effect = next(operation)
        while True:
            if isinstance(effect, Emit):
                found.append(effect.value)
                effect = operation.send(None)
                continue
            try:
                result = yield effect
            except ClientError as error:
                effect = operation.throw(error)
            else:
                effect = operation.send(result)
    except StopIteration:
        return found
