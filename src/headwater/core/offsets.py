"""Offsets: the tokens that name a place between two messages of a stream.

A token is ``{message_index:016x}_{byte_position:016x}``. Both parts count from zero and grow together, so the
lexicographic order of tokens is the order of the stream (protocol §6). Only canonical lower-case tokens parse:
one place has exactly one spelling.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

BEGINNING: Final = "-1"
NOW: Final = "now"

_TOKEN: Final = re.compile(r"[0-9a-f]{16}_[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Offset:
    """A place in a stream: ``index`` messages and ``position`` stored bytes lie before it."""

    index: int
    position: int

    def __str__(self) -> str:
        return f"{self.index:016x}_{self.position:016x}"


ZERO: Final = Offset(0, 0)


def parse_token(token: str) -> Offset | None:
    """The place that a token names, or None when the text is not a canonical token."""
    if _TOKEN.fullmatch(token) is None:
        return None
    return Offset(int(token[:16], 16), int(token[17:], 16))
