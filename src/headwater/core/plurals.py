"""Numbers with their nouns in texts for people."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """A number with its noun: `1 stream`, `2 streams`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
