"""Server-sent events: how messages and their control events look on the wire.

Every `data` event is followed by a `control` event (protocol §5.8). JSON goes as one array per event; text goes one
event per stored message, and anything else likewise in base64. A character that straddles two appends is never cut:
its messages are joined in one event.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from headwater.core.catalog import ContentType
from headwater.core.offsets import Offset

# CR, LF and CRLF end a line in an event stream, and nothing else does: not U+2028, not U+0085.
_LINE_END: Final = re.compile(rb"\r\n|\r|\n")
_EVENT: Final = b"event: data\n"


class Event(NamedTuple):
    """A `data` event's payload and the place after it."""

    payload: bytes
    end: Offset


def events_of(
    kind: ContentType, data: bytes, lengths: Sequence[int], start: Offset, *, more_may_come: bool
) -> list[Event]:
    """The events for a run of messages. A last message that ends within a character waits while more may come."""
    if kind.json:
        end = Offset(start.index + len(lengths), start.position + len(data))
        return [Event(_data(b"[" + data[:-1] + b"]"), end)]
    events: list[Event] = []
    taken = 0
    at = 0
    for index, length in enumerate(lengths, start.index + 1):
        at += length
        message = data[taken:at]
        is_last = at == len(data)
        if kind.text and _ends_within_character(message) and (more_may_come or not is_last):
            continue
        payload = _data(message) if kind.text else _EVENT + b"data:" + b64encode(message) + b"\n\n"
        events.append(Event(payload, Offset(index, start.position + at)))
        taken = at
    return events


def control(end: Offset, cursor: str | None, *, up_to_date: bool, closed: bool) -> bytes:
    """The control event: where to go on, and whether there is anything to wait for."""
    if closed:
        return b'event: control\ndata:{"streamNextOffset":"%b","upToDate":true,"streamClosed":true}\n\n' % (
            str(end).encode()
        )
    suffix = b',"upToDate":true' if up_to_date else b""
    return b'event: control\ndata:{"streamNextOffset":"%b","streamCursor":"%b"%b}\n\n' % (
        str(end).encode(),
        (cursor or "").encode(),
        suffix,
    )


def as_chunk(payload: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def as_array(slices: Iterator[bytes | memoryview], length: int) -> Iterator[bytes | memoryview]:
    """Stored JSON messages as one array: brackets around, and without the last comma."""
    yield b"["
    left = length - 1
    for piece in slices:
        yield piece[:left] if len(piece) > left else piece
        left -= len(piece)
    yield b"]"


def _data(payload: bytes) -> bytes:
    if b"\n" not in payload and b"\r" not in payload:
        return _EVENT + _line(payload) + b"\n"
    return _EVENT + b"".join([_line(line) for line in _LINE_END.split(payload)]) + b"\n"


def _line(text: bytes) -> bytes:
    # A reader strips one space after the colon; a line that begins with one gets another to lose.
    return (b"data: " if text.startswith(b" ") else b"data:") + text + b"\n"


def _ends_within_character(message: bytes) -> bool:
    """Whether the message ends in the first bytes of a UTF-8 sequence that the next message may complete."""
    for back in range(1, min(3, len(message)) + 1):
        byte = message[-back]
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            try:
                message[-back:].decode("utf-8")
            except UnicodeDecodeError as error:
                return error.reason == "unexpected end of data"
            return False
    return False
