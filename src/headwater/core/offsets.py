"""Offsets: tokens for the boundaries between the messages of a stream.

A token is ``{message_index:016x}_{byte_position:016x}_{incarnation:016x}``. The first two parts count from zero and
grow together, so the lexicographic order of tokens is the order of the stream (protocol §6). The third part is the id
of the incarnation that the offset belongs to, so that an offset of a deleted stream is not used in the next stream of
that name. Tokens without it are valid input: the server sent them before it had incarnations. Only canonical lower-case
tokens are parsed.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

BEGINNING: Final = "-1"
NOW: Final = "now"

_TOKEN: Final = re.compile(r"([0-9a-f]{16})_([0-9a-f]{16})(?:_([0-9a-f]{16}))?", re.ASCII)


class Offset(msgspec.Struct, frozen=True, order=True, gc=False):
    """A boundary in a stream: ``message_index`` messages and ``byte_position`` stored bytes are before it."""

    message_index: int
    byte_position: int

    def __str__(self) -> str:
        return f"{self.message_index:016x}_{self.byte_position:016x}"


ZERO: Final = Offset(0, 0)


class OffsetToken(NamedTuple):
    """A parsed token. ``incarnation`` is None for a token of two parts."""

    offset: Offset
    incarnation: int | None


def parse_token(text: str) -> OffsetToken | None:
    """Parse a canonical token; None for any other text."""
    found = _TOKEN.fullmatch(text)
    if found is None:
        return None
    message_index, byte_position, incarnation = found.groups()
    return OffsetToken(
        Offset(int(message_index, 16), int(byte_position, 16)),
        int(incarnation, 16) if incarnation is not None else None,
    )


def format_token(message_index: int, byte_position: int, incarnation: int) -> str:
    """The token of an offset in an incarnation."""
    return f"{message_index:016x}_{byte_position:016x}_{incarnation:016x}"


def same_offset(one: str | None, other: str | None) -> bool:
    """Whether two offsets from clients are equal; a token of two parts matches any incarnation."""
    if one == other:
        return True
    first = parse_token(one) if one is not None else None
    second = parse_token(other) if other is not None else None
    if first is None or second is None or first.offset != second.offset:
        return False
    return first.incarnation is None or second.incarnation is None
