"""Stream names: decoded once, canonicalised once, refused when ambiguous.

Everything after the router sees only the canonical name. So two spellings of a path cannot reach one stream by
different rules, and a check of one spelling cannot be bypassed with another.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_to_bytes

from headwater.core.errors import InvalidName

RESERVED_SEGMENT: Final = "__ds"
"""First segment of the subscription API; never part of a stream's name."""
_CONTROL: Final = re.compile("[\0-\x1f\x7f]")


def canonical_name(raw_path: bytes, max_bytes: int) -> str:
    """Decode a percent-encoded path (below the stream root, no leading slash) to a stream name."""
    # An encoded slash is a slash: some clients encode a whole name as one segment.
    return check_name(decode_segment(raw_path), max_bytes)


def decode_segment(raw: bytes) -> str:
    """Decode a percent-encoded piece of a path, once."""
    if b"%" in raw and not _escapes_are_complete(raw):
        raise InvalidName(
            "The path has a percent sign that is not followed by two hex digits; write a percent sign as %25."
        )
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidName("The name is not valid UTF-8; percent-encode its bytes in UTF-8.") from None


def check_name(name: str, max_bytes: int) -> str:
    """Check a decoded name and return it; an empty, too long or ambiguous one is refused."""
    if not name:
        raise InvalidName("The stream name is empty; name the stream as in /v1/stream/{name}.")
    if len(name.encode("utf-8", "surrogatepass")) > max_bytes:
        raise InvalidName(
            f"The stream name is longer than {max_bytes} bytes (limits.max_name_bytes); choose a shorter one."
        )
    if _CONTROL.search(name) is not None:
        raise InvalidName(f"Stream name {name!r} may not contain control characters; remove them.")
    if "\\" in name:
        raise InvalidName(f"Stream name {name!r} may not contain a backslash; use / between segments.")
    segments = name.split("/")
    if "" in segments:
        raise InvalidName(
            f"Stream name {name!r} may not contain empty segments or end with a slash; remove the extra slash."
        )
    if "." in segments or ".." in segments:
        raise InvalidName(f"Stream name {name!r} may not contain the segments '.' or '..'; remove them.")
    if segments[0] == RESERVED_SEGMENT:
        raise InvalidName(f"Names below {RESERVED_SEGMENT}/ are reserved; choose another name.")
    return name


def is_client_name(name: str) -> bool:
    """Whether a stream belongs to `/v1/stream/`; the names of all other streams begin with a slash."""
    return not name.startswith("/")


def _escapes_are_complete(raw_path: bytes) -> bool:
    for piece in raw_path.split(b"%")[1:]:
        if len(piece) < 2 or not all(chr(byte) in "0123456789abcdefABCDEF" for byte in piece[:2]):
            return False
    return True
