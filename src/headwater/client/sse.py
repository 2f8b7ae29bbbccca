"""Parse server-sent events without I/O.

As in the HTML standard, lines end with CR, LF or CRLF, and a blank line ends an event.
"""

from __future__ import annotations

from typing import NamedTuple

from headwater.client.errors import MalformedResponseError


class Event(NamedTuple):
    kind: str
    data: bytes


class SseParser:
    """Parses one response. An incomplete event at the end of the response is dropped."""

    __slots__ = ("_data", "_ended_with_cr", "_kind", "_partial")

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._ended_with_cr = False
        self._kind = ""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        found: list[Event] = []
        for line in self._lines(data):
            if not line:
                if self._data:
                    found.append(Event(self._kind or "message", b"\n".join(self._data)))
                self._kind, self._data = "", []
                continue
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            elif field == b"event":
                self._kind = value.removeprefix(b" ").decode("utf-8", "replace")
            elif field not in {b"", b"id", b"retry"}:
                raise MalformedResponseError(f"an event has an unknown field: {field[:80]!r}")
        return found

    def _lines(self, data: bytes) -> list[bytes]:
        if self._ended_with_cr:
            # The previous CR ended its line; an LF after it is part of the same line end.
            data = data.removeprefix(b"\n")
            self._ended_with_cr = not data
        if not data:
            return []
        if b"\r" in data:
            self._ended_with_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in data:
            self._partial.append(data)
            return []
        lines = data.split(b"\n")
        if self._partial:
            self._partial.append(lines[0])
            lines[0] = b"".join(self._partial)
        last = lines.pop()
        self._partial = [last] if last else []
        return lines
