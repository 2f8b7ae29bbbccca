"""Parse multipart bodies without I/O, holding at most a piece of a part in memory (RFC 2046 §5.1).

The parser is strict: no preamble, no epilogue, exactly one Content-Type per part, and a closing delimiter. Anything
else is a `MalformedResponseError`, because a lenient parser could accept a truncated body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from headwater.client.errors import MalformedResponseError

HEAD_MAX_BYTES: Final = 16 * 1024
_BOUNDARY: Final = re.compile(
    r"""\s*multipart/mixed\s*;(?:[^"]*;)?\s*boundary\s*=\s*(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))\s*(?:;.*)?""",
    re.IGNORECASE,
)


def boundary_of(content_type: str) -> bytes:
    """The boundary in a Content-Type header."""
    found = _BOUNDARY.fullmatch(content_type)
    if found is None:
        raise MalformedResponseError(f"Content-Type is not multipart/mixed with a boundary: {content_type!r}")
    return (found[1] or found[2]).encode("latin-1")


class PartStart(NamedTuple):
    """A part begins. The pieces of its body follow, as bytes, then a `PartEnd`."""

    content_type: str


class PartEnd(NamedTuple):
    """The part is complete."""


_PART_END: Final = PartEnd()

PartEvent = PartStart | bytes | PartEnd


class MultipartParser:
    """Parses one body. Call `finish` at its end."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b""
        self._at = 0
        self._step = self._opening

    def feed(self, data: bytes) -> Iterator[PartEvent]:
        """The events that these bytes complete. Exhaust the iterator before the next call."""
        self._buffer = self._buffer[self._at :] + data
        self._at = 0
        while True:
            at, step = self._at, self._step
            event = step()
            if event is not None:
                yield event
            elif self._at == at and self._step == step:
                return

    def finish(self) -> None:
        if self._step != self._epilogue:
            raise MalformedResponseError("the body ends before its closing delimiter")
        if self._buffer[self._at :] not in {b"", b"\r\n"}:
            raise MalformedResponseError("there is data after the closing delimiter")

    # -- parser states: each consumes bytes of the buffer, or waits for more -----------------------------------------

    def _opening(self) -> PartEvent | None:
        if self._consume(self._delimiter[2:]):
            self._step = self._after_delimiter
        return None

    def _after_delimiter(self) -> PartEvent | None:
        if self._buffer.startswith(b"-", self._at):
            if self._consume(b"--"):
                self._step = self._epilogue
        elif self._consume(b"\r\n"):
            self._step = self._head
        return None

    def _head(self) -> PartEvent | None:
        """Parse the header fields of a part."""
        start = self._at
        if self._buffer.startswith(b"\r\n", start):
            end, self._at = start, start + 2
        else:
            end = self._buffer.find(b"\r\n\r\n", start)
            if (end if end >= 0 else len(self._buffer)) - start > HEAD_MAX_BYTES:
                raise MalformedResponseError("the headers of a part are too long")
            if end < 0:
                return None
            self._at = end + 4
        self._step = self._body
        return PartStart(_content_type_of(self._buffer[start:end]))

    def _body(self) -> PartEvent | None:
        """Emit everything up to the next delimiter; hold back bytes that could begin one."""
        start, delimiter = self._at, self._delimiter
        end = self._buffer.find(delimiter, start)
        if end == start:
            self._at = end + len(delimiter)
            self._step = self._after_delimiter
            return _PART_END
        certain = end if end >= 0 else len(self._buffer) - len(delimiter) + 1
        if certain <= start:
            return None
        self._at = certain
        return self._buffer[start:certain]

    def _epilogue(self) -> PartEvent | None:
        if len(self._buffer) - self._at > 2:
            raise MalformedResponseError("there is data after the closing delimiter")
        return None

    def _consume(self, expected: bytes) -> bool:
        found = self._buffer[self._at : self._at + len(expected)]
        if not expected.startswith(found):
            raise MalformedResponseError(f"expected {expected!r} between parts, found {found!r}")
        if len(found) < len(expected):
            return False
        self._at += len(expected)
        return True


def _content_type_of(head: bytes) -> str:
    types: list[bytes] = []
    for line in head.split(b"\r\n") if head else ():
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise MalformedResponseError(f"a part has a malformed header line: {line[:80]!r}")
        if name.lower() == b"content-type":
            types.append(value.strip())
    if len(types) != 1:
        raise MalformedResponseError(f"a part has {len(types)} Content-Type headers")
    return types[0].decode("latin-1")
