"""Split large JSON bodies into messages in bounded steps.

Decoding holds the interpreter, so a large body must not be decoded in one call. The array is cut at commas, and each
piece is decoded as a separate array. A cut is a guess that the decoder confirms: if a piece that begins at the start of
an element decodes as a list of complete values, it ends at the end of an element. A guess that fails (a comma within an
object or a string) is replaced by the next one.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Generator
from io import BytesIO
from typing import Final

import msgspec

from headwater.core import native
from headwater.core.content import NO_MESSAGES, Messages, elements_of, invalid_json, split_json
from headwater.core.errors import EmptyBody, InvalidJson, MessageTooLarge, TooManyMessages

STEP_BYTES: Final = 64 * 1024
"""About how much is decoded in one step: at most 32,768 elements."""
SCAN_STEP_BYTES: Final = 256 * 1024
"""About how much the compiled scanner scans in one step: at most 131,072 elements, in about a millisecond."""
GUESSES: Final = 8
"""Commas that are tried as the end of a piece before the piece is doubled."""
_INLINE_BYTES: Final = 1024 * 1024
_INLINE_COMMAS: Final = 20_000
_WHITESPACE: Final = b" \t\r\n"
_ERROR_AT: Final = re.compile(r"\(byte (\d+)\)")
_ENDS: Final = {b"{": b"},", b"[": b"],", b'"': b'",'}
"""How an element of an array most likely ends, by its first byte."""


def needs_steps(body: bytes) -> bool:
    """Whether a body is too large or too dense to be split in one call."""
    size = len(body)
    return size > STEP_BYTES and (size > _INLINE_BYTES or body.count(b",") > _INLINE_COMMAS)


def split_json_in_steps(
    body: bytes, *, max_messages: int, max_message_bytes: int, allow_empty: bool = False
) -> Generator[None, None, Messages]:
    """The messages of a JSON body, as `split_json` returns them. Yields between steps."""
    end = yield from _end_without_whitespace(body)
    if len(body) - end > SCAN_STEP_BYTES:
        body = body[:end]
    scanned = yield from _scan_in_steps(body, max_messages, max_message_bytes)
    if scanned is not None:
        return scanned
    yield from _check_utf8(body)
    begin = yield from _skip_whitespace(body, 0)
    if body[begin : begin + 1] != b"[":
        if len(body) > max_message_bytes:
            raise too_large(max_message_bytes)
        return split_json(body[begin:end], allow_empty=allow_empty)
    end -= 1
    if end <= begin or body[end] != ord("]"):
        raise InvalidJson("The body is not valid JSON: the array does not end; add the missing ].")
    at = begin + 1
    payload = BytesIO()
    lengths: list[int] = []
    while True:
        elements, at = yield from _next_piece(body, at, end, max_message_bytes)
        if not elements:
            if lengths or at < end:
                raise InvalidJson(
                    "The body is not valid JSON: an element of the array is missing; remove the extra comma."
                )
            if allow_empty:
                return NO_MESSAGES
            raise EmptyBody("An empty JSON array appends nothing; send at least one element.")
        payload.write(b",".join(elements))
        payload.write(b",")
        lengths.extend([len(element) + 1 for element in elements])
        if len(lengths) > max_messages:
            raise TooManyMessages(
                f"The body has more than {max_messages} messages (limits.max_append_messages); send several requests."
            )
        if at > end:
            break
        yield
    # The buffer grew a step at a time, and its value is taken without a copy.
    return Messages(payload.getvalue(), tuple(lengths))


def too_large(max_message_bytes: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"A JSON message is larger than {max_message_bytes} bytes (limits.max_json_message_bytes); split it, or store"
        " it"
        " in a stream of bytes."
    )


def _scan_in_steps(body: bytes, max_messages: int, max_message_bytes: int) -> Generator[None, None, Messages | None]:
    """The messages of an array as the compiled scanner splits it; None if it leaves the body to the decoder."""
    at = (yield from _skip_whitespace(body, 0)) + 1
    if body[at - 1 : at] != b"[":
        return None
    payload = BytesIO()
    lengths: list[int] = []
    is_ascii = True
    while at:
        at = yield from _skip_whitespace(body, at)
        scanned = native.scan(body, at, at + SCAN_STEP_BYTES, max_message_bytes)
        if scanned is None:
            return None
        piece, some_lengths, at, piece_is_ascii = scanned
        is_ascii = is_ascii and piece_is_ascii
        payload.write(piece)
        lengths.extend(some_lengths)
        if len(lengths) > max_messages:
            return None
        yield
    if not is_ascii:
        yield from _check_utf8(body)
    return Messages(payload.getvalue(), tuple(lengths))


def _check_utf8(body: bytes) -> Generator[None, None, None]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    try:
        for at in range(0, len(body), 16 * STEP_BYTES):
            decoder.decode(body[at : at + 16 * STEP_BYTES])
            yield
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InvalidJson(
            f"The body is not valid UTF-8 ({error.reason} near byte {at + error.start}); encode it as UTF-8."
        ) from None


def _next_piece(
    body: bytes, at: int, end: int, max_message_bytes: int
) -> Generator[None, None, tuple[list[msgspec.Raw], int]]:
    """The elements of the next piece of the array, and where the one after it begins (after `end` if there is none)."""
    first = yield from _skip_whitespace(body, at)
    likely_end = _ENDS.get(body[first : first + 1], b",")
    size = STEP_BYTES
    while True:
        search_from = at + size
        for _ in range(GUESSES):
            found = body.find(likely_end, search_from, end) if search_from < end else -1
            comma = found + len(likely_end) - 1 if found >= 0 else end
            if comma - search_from > max_message_bytes:
                # Decoding would take long. If there is no comma at all, it is one element.
                if likely_end == b",":
                    raise too_large(max_message_bytes)
                break
            piece = body[at:comma]
            try:
                return elements_of(b"[%b]" % piece), comma + 1
            except msgspec.DecodeError as error:
                if comma == end or _is_within(error, len(piece)):
                    raise invalid_json(piece, error) from None
            except RecursionError:
                raise InvalidJson(
                    "The body is nested too deeply; use fewer arrays and objects inside each other."
                ) from None
            search_from = comma + 1
            yield
        size *= 2
        likely_end = b","
        if size > max_message_bytes + STEP_BYTES:
            raise too_large(max_message_bytes)


def _is_within(error: msgspec.DecodeError, size: int) -> bool:
    """Whether there is an error within a piece of this size, other than that the piece is incomplete."""
    found = _ERROR_AT.search(str(error))
    return found is not None and int(found[1]) <= size


def _skip_whitespace(body: bytes, at: int) -> Generator[None, None, int]:
    """Where the white space that begins at `at` ends: there may be as much of it as fits into a body."""
    while at < len(body):
        part = body[at : at + SCAN_STEP_BYTES]
        rest = len(part.lstrip(_WHITESPACE))
        at += len(part) - rest
        if rest:
            break
        yield
    return at


def _end_without_whitespace(body: bytes) -> Generator[None, None, int]:
    """Where the white space at the end of a body begins."""
    end = len(body)
    while end:
        part = body[max(0, end - SCAN_STEP_BYTES) : end]
        rest = len(part.rstrip(_WHITESPACE))
        end -= len(part) - rest
        if rest:
            break
        yield
    return end
