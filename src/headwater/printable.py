"""Escape untrusted text for a terminal: control characters could move the cursor or fake output."""

from __future__ import annotations

from typing import Final

_CONTROLS: Final = (*range(0x20), *range(0x7F, 0xA0))
_DIRECTIONS: Final = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)
"""Characters that change the text direction or break a line: they can make one name look like another."""

_ESCAPES: Final = {
    **{code: f"\\x{code:02x}" for code in _CONTROLS},
    **{code: f"\\u{code:04x}" for code in _DIRECTIONS},
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
}
_JSON_ESCAPES: Final = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *_DIRECTIONS)}


def printable(text: str) -> str:
    """Untrusted text on one line, without characters that control a terminal."""
    return text.translate(_ESCAPES)


def printable_json(text: str) -> str:
    """Escape characters that are valid in JSON but that a terminal may interpret; the JSON value is unchanged."""
    return text.translate(_JSON_ESCAPES)
