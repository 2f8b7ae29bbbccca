"""Encode messages and control events as server-sent events.

Every `data` event is followed by a `control` event (protocol §5.8). JSON is sent as one array per event; text as one
event per stored message, and other content likewise in base64. A character that spans two appends is not split: its
messages are joined in one event, if the second can complete the first. A large message is encoded in pieces.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from headwater.core.catalog import ContentType
from headwater.core.offsets import Offset

HOLD_MAX_BYTES: Final = 64 * 1024
"""Text that ends within a character is held back up to this size."""
_PIECE_BYTES: Final = 64 * 1024
_EVENT: Final = b"event: data\n"
_UTF8: Final = frozenset(("", "utf-8", "utf8"))


class SseEvent(NamedTuple):
    """An encoded `data` event and the offset after it."""

    payload: bytes
    end: Offset


@lru_cache(maxsize=1024)
def is_utf8(content_type: str) -> bool:
    """Whether text of this type is UTF-8, so that a character may span two messages."""
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"').lower() in _UTF8
    return True


def events_of(kind: ContentType, data: bytes, lengths: Sequence[int], start: Offset, *, hold: bool) -> list[SseEvent]:
    """The events for a run of messages of any type except JSON.

    With `hold`, a last message that ends within a character is omitted: the next one may complete it. The run then
    ends before it.
    """
    may_join = kind.text and is_utf8(kind.header)
    events: list[SseEvent] = []
    taken = 0
    at = 0
    for index, length in enumerate(lengths, start.message_index + 1):
        at += length
        if may_join and at - taken < HOLD_MAX_BYTES:
            tail = _incomplete_character(data[max(taken, at - 3) : at])
            if tail and (_may_follow(tail, data[at]) if at < len(data) else hold):
                continue
        message = data[taken:at]
        payload = data_event(message) if kind.text else _EVENT + b"data:" + b64encode(message) + b"\n\n"
        events.append(SseEvent(payload, Offset(index, start.byte_position + at)))
        taken = at
    return events


def json_event(data: bytes, end: Offset) -> SseEvent:
    """One event for a run of stored JSON messages."""
    return SseEvent(data_event(b"[" + data[:-1] + b"]"), end)


def data_event(text: bytes) -> bytes:
    """One `data` event. Only CR, LF and CRLF end a line in an event stream."""
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    # A client strips one space after the colon, so a line that begins with a space gets another one.
    first = b"data: " if text.startswith(b" ") else b"data:"
    if b"\n" in text:
        text = text.replace(b"\n ", b"\n  ").replace(b"\n", b"\ndata:")
    return b"%b%b%b\n\n" % (_EVENT, first, text)


def large_event(kind: ContentType, pieces: Iterable[bytes | memoryview], last_line: bytes = b"") -> Iterator[bytes]:
    """One `data` event whose message is read in pieces, so that it is never completely in memory."""
    yield _EVENT + b"data:"
    yield from _text_pieces(pieces) if kind.text else _base64_pieces(pieces)
    yield b"\n%b\n" % last_line


def _text_pieces(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    at_line_start = True
    ends_in_cr = b""
    for piece in _small(pieces, _PIECE_BYTES):
        text = ends_in_cr + bytes(piece)
        ends_in_cr = b""
        if text.endswith(b"\r"):
            # The next piece may begin with the LF of this CR.
            ends_in_cr, text = b"\r", text[:-1]
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not text:
            continue
        if at_line_start and text.startswith(b" "):
            text = b" " + text
        at_line_start = text.endswith(b"\n")
        text = text.replace(b"\n ", b"\n  ").replace(b"\n", b"\ndata:")
        yield text
    if ends_in_cr:
        yield b"\ndata:"


def _small(pieces: Iterable[bytes | memoryview], size: int) -> Iterator[bytes | memoryview]:
    """The same bytes in small pieces: encoding multiplies their size, and each silent reader keeps one."""
    for piece in pieces:
        for at in range(0, len(piece), size):
            yield piece[at : at + size]


def _base64_pieces(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    rest = b""
    for piece in _small(pieces, _PIECE_BYTES * 3 // 4):
        data = rest + bytes(piece)
        complete = len(data) - len(data) % 3
        rest = data[complete:]
        yield b64encode(data[:complete])
    yield b64encode(rest)


def with_id(event: bytes, offset: str) -> bytes:
    """Add an id to an event, which a browser's `EventSource` keeps and sends as `Last-Event-ID`.

    The id is the last line: simple readers expect the name of the event in the first one.
    """
    return b"%b%b\n" % (event[:-1], id_line(offset))


def id_line(offset: str) -> bytes:
    return b"id:%b\n" % offset.encode()


def control_event(offset: str, cursor: str | None, *, up_to_date: bool, closed: bool) -> bytes:
    """The control event: the offset to resume from, and whether the stream is up to date or closed."""
    if closed:
        return b'event: control\ndata:{"streamNextOffset":"%b","upToDate":true,"streamClosed":true}\n\n' % (
            offset.encode()
        )
    suffix = b',"upToDate":true' if up_to_date else b""
    return b'event: control\ndata:{"streamNextOffset":"%b","streamCursor":"%b"%b}\n\n' % (
        offset.encode(),
        (cursor or "").encode(),
        suffix,
    )


def as_chunk(payload: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _incomplete_character(end: bytes) -> bytes:
    """The incomplete UTF-8 sequence at the end of a text, if more bytes can complete it; else empty."""
    for back in range(1, min(3, len(end)) + 1):
        byte = end[-back]
        if byte < 0x80:
            return b""
        if byte >= 0xC0:
            return end[-back:] if _is_incomplete(end[-back:]) else b""
    return b""


def _may_follow(incomplete: bytes, byte: int) -> bool:
    """Whether a byte continues or completes an incomplete sequence."""
    sequence = incomplete + bytes((byte,))
    try:
        sequence.decode("utf-8")
    except UnicodeDecodeError:
        return _is_incomplete(sequence)
    return True


def _is_incomplete(sequence: bytes) -> bool:
    try:
        sequence.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False
