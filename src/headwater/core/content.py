"""Content types, and how a request body becomes messages.

Stored bytes are wire bytes. A JSON message is stored followed by one comma, so that any run of messages is a JSON
array once it is wrapped in brackets and loses its last comma; numbers, key order and escapes stay as they were sent.
A body of any other type is one message, stored as it is.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from headwater.core import native
from headwater.core.errors import EmptyBody, InvalidContentType, InvalidJson

DEFAULT_CONTENT_TYPE: Final = "application/octet-stream"
JSON_MEDIA_TYPE: Final = "application/json"

TYPE_MAX_CHARS: Final = 1024
"""Length of a content type: it is kept in memory for each stream and each snapshot."""
DESCRIBED_BYTES: Final = 64 * 1024
"""How much of an invalid JSON body is searched for half of a surrogate pair, to name it in the error."""
_TOKEN: Final = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_QUOTED: Final = r'"(?:[^"\\]|\\.)*"'
_PARAMETER: Final = rf"{_TOKEN}=(?:{_TOKEN}|{_QUOTED})"
_CONTENT_TYPE: Final = re.compile(rf"{_TOKEN}/{_TOKEN}(?:\s*+;\s*+(?:{_PARAMETER})?+)*+", re.DOTALL)
"""RFC 9110, section 8.3.1: a media type and its parameters, which may be empty; no backtracking into spaces."""
_WHITESPACE: Final = b" \t\r\n"
_ESCAPE: Final = re.compile(rb"\\(?:u([0-9A-Fa-f]{4})|.)", re.DOTALL)

# `Raw` keeps each element as the client wrote it, without the white space around it, and is 5 to 7 times faster
# than decoding to objects. It is strict on syntax and on surrogate escapes, but lets invalid UTF-8 pass.
elements_of: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_value: Final = msgspec.json.Decoder(msgspec.Raw)


class Messages(NamedTuple):
    """The stored form of one append: its bytes, and the length of each message within them."""

    payload: bytes
    lengths: tuple[int, ...]


NO_MESSAGES: Final = Messages(b"", ())


def media_type(content_type: str) -> str:
    """The part of a content type that is compared: lower case, without parameters (a charset is one of them)."""
    return content_type.partition(";")[0].strip().lower()


def check_content_type(content_type: str) -> str:
    """A content type that may name a stream's type, as the client wrote it."""
    stripped = content_type.strip()
    if _CONTENT_TYPE.fullmatch(stripped) is None:
        raise InvalidContentType(
            "Content-Type must be a media type such as text/plain or application/json; charset=utf-8,"
            f" not {content_type!r}."
        )
    if len(stripped) > TYPE_MAX_CHARS:
        raise InvalidContentType(f"Content-Type has {len(stripped)} characters; use at most {TYPE_MAX_CHARS}.")
    return stripped


def is_json(content_type: str) -> bool:
    return media_type(content_type) == JSON_MEDIA_TYPE


def is_text(content_type: str) -> bool:
    """Whether server-sent events contain the stream as text; other content is sent as base64 (protocol §5.8)."""
    kind = media_type(content_type)
    return kind == JSON_MEDIA_TYPE or kind.startswith("text/")


def split_json(body: bytes, *, allow_empty: bool = False) -> Messages:
    """The messages of a JSON body: the elements of a top-level array, or the one value that it is (§7.1)."""
    scanned = native.split(body)
    if scanned is not None:
        payload, lengths, is_ascii = scanned
        if not is_ascii:
            _check_utf8(body)
        return Messages(payload, lengths)
    if not body.isascii():
        _check_utf8(body)
    try:
        if body.lstrip(_WHITESPACE)[:1] != b"[":
            value = bytes(_value.decode(body))
            return Messages(value + b",", (len(value) + 1,))
        elements = elements_of(body)
    except msgspec.DecodeError as error:
        raise invalid_json(body, error) from None
    except RecursionError:
        raise InvalidJson("The body is nested too deeply; use fewer arrays and objects inside each other.") from None
    if not elements:
        if allow_empty:
            return NO_MESSAGES
        raise EmptyBody("An empty JSON array appends nothing; send at least one element.")
    payload = b",".join(elements) + b","
    return Messages(payload, tuple([len(element) + 1 for element in elements]))


def _check_utf8(body: bytes) -> None:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJson(
            f"The body is not valid UTF-8 ({error.reason} at byte {error.start}); encode it as UTF-8."
        ) from None


def split_body(content_type: str, body: bytes, *, creating: bool = False) -> Messages:
    """The messages that a body adds to a stream of this type. An empty body adds none."""
    if not body:
        return NO_MESSAGES
    if is_json(content_type):
        return split_json(body, allow_empty=creating)
    return Messages(body, (len(body),))


def invalid_json(body: bytes, error: msgspec.DecodeError) -> InvalidJson:
    """Describe the error in a body. The decoder reports half of a surrogate pair as truncated input; this names it.

    Only the beginning is searched for one: a body may consist of escapes, and each takes half a microsecond.
    """
    high: re.Match[bytes] | None = None
    for escape in _ESCAPE.finditer(body, 0, DESCRIBED_BYTES):
        unit = int(escape[1], 16) if escape[1] is not None else 0
        if high is not None and not (0xDC00 <= unit <= 0xDFFF and escape.start() == high.end()):
            return _lone_surrogate(high)
        if high is None and 0xDC00 <= unit <= 0xDFFF:
            return _lone_surrogate(escape)
        high = escape if 0xD800 <= unit <= 0xDBFF else None
    if high is not None and (len(body) <= DESCRIBED_BYTES or high.end() + 6 <= DESCRIBED_BYTES):
        return _lone_surrogate(high)
    return InvalidJson(f"The body is not valid JSON; correct it: {error}.")


def _lone_surrogate(escape: re.Match[bytes]) -> InvalidJson:
    return InvalidJson(
        f"The escape {escape[0].decode('ascii')} at byte {escape.start()} is half of a surrogate pair and not a"
        " character; send both halves, or U+FFFD instead."
    )
