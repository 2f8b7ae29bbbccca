"""Reading a multipart body part by part, without ever holding more than a piece of it (RFC 2046 §5.1).

Strict: no preamble, no epilogue, every part with exactly one Content-Type, and the closing delimiter must come. What
is not so is `MalformedAnswer`, because a body that was read leniently could be half of what was sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from headwater.client.errors import MalformedAnswer

HEAD_MAX_BYTES: Final = 16 * 1024
_BOUNDARY: Final = re.compile(
    r"""\s*multipart/mixed\s*;(?:[^"]*;)?\s*boundary\s*=\s*(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))\s*(?:;.*)?""",
    re.IGNORECASE,
)


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type header names."""
    found = _BOUNDARY.fullmatch(content_type)
    if found is None:
        raise MalformedAnswer(f"Content-Type is not multipart/mixed with a boundary: {content_type!r}")
    return (found[1] or found[2]).encode("latin-1")


class Part:
    """One part. Its body comes in chunks, and can be read once, before the next part is asked for."""

    __slots__ = ("_chunks", "content_type")

    def __init__(self, content_type: str, chunks: Iterator[bytes]) -> None:
        self.content_type = content_type
        self._chunks = chunks

    def chunks(self) -> Iterator[bytes]:
        return self._chunks

    def read(self) -> bytes:
        return b"".join(self._chunks)


def parts(chunks: Iterable[bytes], boundary: bytes) -> Iterator[Part]:
    """The parts of a body that arrives in chunks. What is left unread of a part is passed over."""
    return _Reader(iter(chunks), boundary).parts()


class _Reader:
    def __init__(self, chunks: Iterator[bytes], boundary: bytes) -> None:
        self._chunks = chunks
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b""
        self._at = 0

    def parts(self) -> Iterator[Part]:
        self._expect(self._delimiter[2:])
        while not self._is_end():
            self._expect(b"\r\n")
            content_type = self._head()
            body = self._body()
            yield Part(content_type, body)
            for _ in body:
                pass
        self._expect(b"--")
        while self._more():
            pass
        if self._buffer[self._at :] not in (b"", b"\r\n"):
            raise MalformedAnswer("something follows the closing delimiter")

    def _is_end(self) -> bool:
        while len(self._buffer) - self._at < 2:
            self._need_more()
        return self._buffer.startswith(b"--", self._at)

    def _head(self) -> str:
        """The header fields of a part; the body begins right behind them."""
        fields: list[tuple[bytes, bytes]] = []
        read = 0
        while line := self._line():
            name, colon, value = line.partition(b":")
            if not colon or not name or name != name.strip():
                raise MalformedAnswer(f"a part has a malformed header line: {line[:80]!r}")
            fields.append((name.lower(), value.strip()))
            read += len(line)
            if read > HEAD_MAX_BYTES:
                raise MalformedAnswer("the headers of a part are too long")
        types = [value for name, value in fields if name == b"content-type"]
        if len(types) != 1:
            raise MalformedAnswer(f"a part has {len(types)} Content-Type headers")
        return types[0].decode("latin-1")

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._at)) < 0:
            if len(self._buffer) - self._at > HEAD_MAX_BYTES:
                raise MalformedAnswer("a header line of a part is too long")
            self._need_more()
        line = self._buffer[self._at : end]
        self._at = end + 2
        return line

    def _body(self) -> Iterator[bytes]:
        """All up to the next delimiter; a piece that could be the beginning of one is held back."""
        delimiter = self._delimiter
        while (end := self._buffer.find(delimiter, self._at)) < 0:
            sure = max(self._at, len(self._buffer) - len(delimiter) + 1)
            if sure > self._at:
                piece, self._at = self._buffer[self._at : sure], sure
                yield piece
            self._need_more()
        piece, self._at = self._buffer[self._at : end], end + len(delimiter)
        if piece:
            yield piece

    def _expect(self, text: bytes) -> None:
        while len(self._buffer) - self._at < len(text):
            self._need_more()
        if not self._buffer.startswith(text, self._at):
            found = self._buffer[self._at : self._at + len(text)]
            raise MalformedAnswer(f"expected {text!r} between parts, found {found!r}")
        self._at += len(text)

    def _need_more(self) -> None:
        if not self._more():
            raise MalformedAnswer("the body ends before its closing delimiter")

    def _more(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        self._buffer = self._buffer[self._at :] + chunk
        self._at = 0
        return True
