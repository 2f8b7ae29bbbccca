"""One stream on a server, by its URL: append, read live, publish a snapshot, bootstrap.

Whatever the content type, updates come as messages: JSON arrays are split into their elements, base64 is decoded. In
plain text over server-sent events a carriage return becomes a line feed, as that format has it; where this matters,
read by long-poll.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

import httpx
import msgspec

from headwater.client.errors import MalformedAnswer, NoEvents, check
from headwater.client.events import events
from headwater.client.multipart import Part, boundary_of, parts

EVENTS_TYPE: Final = "text/event-stream"
READ_TIMEOUT_S: Final = 90.0
"""Longer than servers leave a live read open (60 s): a connection that is silent for so long is dead."""
SNAPSHOT_CHUNK_BYTES: Final = 256 * 1024

_EVENTS_REFUSED: Final = frozenset((400, 405, 406, 415, 501))
_elements: Final = msgspec.json.Decoder(list[msgspec.Raw])
_JSON: Final = re.compile(r"\s*application/json\s*(;.*)?", re.IGNORECASE)


class _Control(msgspec.Struct, rename="camel"):
    """The control event behind every data event."""

    stream_next_offset: str
    stream_cursor: str | None = None
    up_to_date: bool = False
    stream_closed: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Some messages of a stream, and where to go on behind them."""

    messages: tuple[bytes, ...]
    next_offset: str
    up_to_date: bool
    closed: bool
    cursor: str | None = None
    position: int | None = None
    """How many messages lie before `next_offset`, where the server tells."""


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The answer to a bootstrap: a snapshot, then updates. `parts` yields them once, in that order."""

    snapshot_offset: str
    next_offset: str
    closed: bool
    position: int | None
    parts: Iterator[Part]
    missing_before: str | None = None
    """The offset before which messages are gone and no snapshot stands for them; None when nothing is missing."""

    @property
    def has_snapshot(self) -> bool:
        return self.snapshot_offset != "-1"


class Stream:
    """A stream of the `/ds/` surface (or, but for snapshots and bootstrap, of any other).

    Close it, or use it in a `with`, unless the client it works with was given: that one is its owner's.
    """

    def __init__(self, url: str, http: httpx.Client | None = None) -> None:
        self.url = url.rstrip("/")
        self._is_json: bool | None = None
        self._owns_http = http is None
        self._http = http if http is not None else httpx.Client(timeout=httpx.Timeout(30.0, read=READ_TIMEOUT_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._owns_http:
            self._http.close()

    def create(self, content_type: str = "application/json", headers: dict[str, str] | None = None) -> str:
        """Create the stream, or find it as asked for; returns its next offset."""
        response = self._http.put(self.url, headers={"Content-Type": content_type, **(headers or {})})
        check(response, 200, 201)
        return _next_offset(response)

    def append(
        self, content: bytes, content_type: str = "application/json", headers: dict[str, str] | None = None
    ) -> str:
        """Append; returns the offset behind what was appended."""
        response = self._http.post(self.url, content=content, headers={"Content-Type": content_type, **(headers or {})})
        check(response, 200, 204)
        return _next_offset(response)

    def tail(self) -> str:
        response = self._http.head(self.url)
        check(response, 200)
        return _next_offset(response)

    def publish_snapshot(
        self, offset: str, content: bytes | Iterable[bytes], content_type: str = "application/octet-stream"
    ) -> None:
        """Publish the state that all messages before `offset` fold to. Content of any size may come in chunks."""
        response = self._http.put(
            f"{self.url}/snapshot/{quote(offset, safe='')}", content=content, headers={"Content-Type": content_type}
        )
        check(response, 204)

    @contextmanager
    def bootstrap(self) -> Iterator[Bootstrap]:
        """Snapshot and updates in one answer, read as it arrives."""
        with self._http.stream("GET", f"{self.url}/bootstrap") as response:
            check(response, 200)
            boundary = boundary_of(response.headers.get("content-type", ""))
            snapshot_offset = response.headers.get("stream-snapshot-offset")
            if snapshot_offset is None:
                raise MalformedAnswer("the answer does not say what its snapshot covers")
            yield Bootstrap(
                snapshot_offset,
                _next_offset(response),
                _is_true(response, "stream-closed"),
                _position(response),
                parts(response.iter_bytes(), boundary),
                response.headers.get("stream-earliest-offset") if snapshot_offset == "-1" else None,
            )

    def events(self, offset: str, cursor: str | None = None) -> Iterator[Batch]:
        """Updates behind `offset` by server-sent events, until the server ends the response."""
        is_json = self._has_json()
        query = _query(offset, "sse", cursor)
        with self._http.stream("GET", self.url, params=query, headers={"Accept": EVENTS_TYPE}) as response:
            if response.status_code in _EVENTS_REFUSED:
                raise NoEvents(f"the server answers {response.status_code}")
            check(response, 200)
            kind = response.headers.get("content-type", "")
            if not kind.startswith(EVENTS_TYPE):
                raise NoEvents(f"the server answers {kind or 'without a type'}")
            is_base64 = response.headers.get("stream-sse-data-encoding", "") == "base64"
            messages: list[bytes] = []
            for event in events(response.iter_bytes()):
                if event.kind == "data" and is_json:
                    messages.extend(_split(event.data))
                elif event.kind == "data":
                    messages.append(_decoded(event.data) if is_base64 else event.data)
                elif event.kind == "control":
                    control = _control(event.data)
                    yield Batch(
                        tuple(messages),
                        control.stream_next_offset,
                        control.up_to_date,
                        control.stream_closed,
                        control.stream_cursor,
                    )
                    messages = []

    def long_poll(self, offset: str, cursor: str | None = None, position: int | None = None) -> Batch:
        """The next updates behind `offset`, waited for as long as the server likes.

        `position` is how many messages lie before `offset`, if that is known. Messages of a type that does not part
        them are read once more, framed, unless it is known that there is but one; a server that cannot frame gives
        them as one.
        """
        response = self._http.get(self.url, params=_query(offset, "long-poll", cursor))
        check(response, 200, 204)
        messages: tuple[bytes, ...] = ()
        next_offset, now_at = _next_offset(response), _position(response)
        if response.status_code == 200:
            if _JSON.fullmatch(response.headers.get("content-type", "")):
                messages = _split(response.content)
            elif now_at is None or now_at - 1 == position:
                messages = (response.content,)
            else:
                messages = self._framed(offset, next_offset)
        return Batch(
            messages,
            next_offset,
            _is_true(response, "stream-up-to-date"),
            _is_true(response, "stream-closed"),
            response.headers.get("stream-cursor"),
            now_at if now_at is not None or messages else position,
        )

    def _has_json(self) -> bool:
        if self._is_json is None:
            response = self._http.head(self.url)
            check(response, 200)
            self._is_json = _JSON.fullmatch(response.headers.get("content-type", "")) is not None
        return self._is_json

    def _framed(self, offset: str, until: str) -> tuple[bytes, ...]:
        """The messages between two offsets, one by one."""
        found: list[bytes] = []
        while offset != until:
            response = self._http.get(self.url, params={"offset": offset, "until": until, "frames": "1"})
            check(response, 200)
            body = response.content
            count = int.from_bytes(body[:4], "little")
            at = 4 + 4 * count
            for number in range(count):
                length = int.from_bytes(body[4 + 4 * number : 8 + 4 * number], "little")
                found.append(body[at : at + length])
                at += length
            if at != len(body) or not count:
                raise MalformedAnswer("the frames of a read do not add up to its length")
            offset = _next_offset(response)
        return tuple(found)


def _query(offset: str, live: str, cursor: str | None) -> dict[str, str]:
    query = {"offset": offset, "live": live}
    if cursor is not None:
        query["cursor"] = cursor
    return query


def _split(array: bytes) -> tuple[bytes, ...]:
    try:
        return tuple(bytes(element) for element in _elements.decode(array))
    except msgspec.MsgspecError as error:
        raise MalformedAnswer(f"a batch is not a JSON array: {error}") from None


def _decoded(text: bytes) -> bytes:
    try:
        return base64.b64decode(text.replace(b"\n", b""), validate=True)
    except ValueError as error:
        raise MalformedAnswer(f"an event is not base64: {error}") from None


def _control(data: bytes) -> _Control:
    try:
        return msgspec.json.decode(data, type=_Control)
    except msgspec.MsgspecError as error:
        raise MalformedAnswer(f"a control event is malformed: {error}") from None


def _next_offset(response: httpx.Response) -> str:
    offset = response.headers.get("stream-next-offset")
    if not isinstance(offset, str):
        raise MalformedAnswer("the answer has no Stream-Next-Offset")
    return offset


def _position(response: httpx.Response) -> int | None:
    text = response.headers.get("stream-next-position", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _is_true(response: httpx.Response, name: str) -> bool:
    return bool(response.headers.get(name, "").lower() == "true")
