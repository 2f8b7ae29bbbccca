"""Positions in Postgres's WAL (LSNs), as comparable numbers and as text."""

from __future__ import annotations


def lsn_from_text(text: str) -> int:
    """`16/B374D848` as a number."""
    high, slash, low = text.partition("/")
    if not slash:
        raise ValueError(f"{text!r} is not an LSN, which has the form 16/B374D848")
    return int(high, 16) << 32 | int(low, 16)


def lsn_to_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
