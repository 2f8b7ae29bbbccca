"""Reading server-sent events as the HTML standard says: lines end at CR, LF or CRLF, a blank line ends an event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headwater.client.errors import MalformedAnswer


class Event(NamedTuple):
    kind: str
    data: bytes


def events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """The events of a response. One that the end of the response cuts short is not an event."""
    kind = ""
    data: list[bytes] = []
    for line in _lines(chunks):
        if not line:
            if data:
                yield Event(kind or "message", b"\n".join(data))
            kind, data = "", []
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            kind = value.decode("utf-8", "replace")
        elif field not in (b"", b"id", b"retry"):
            raise MalformedAnswer(f"unknown field of an event: {field[:80]!r}")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        # A CR at the very end may be half of a CRLF: it waits for what follows.
        held = b"\r" if chunk.endswith(b"\r") else b""
        text = (rest + chunk.removesuffix(held)).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        rest += held
        yield from lines
