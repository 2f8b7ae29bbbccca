"""Columns of numbers, computed in pieces.

A list of a million numbers takes ten times the memory of its array, and the interpreter lock is held while the list is
converted and while it is freed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, Literal

from headwater.core import native

NUMBERS_AT_ONCE: Final = 65_536


def shifted(numbers: Sequence[int], by: int, type_: Literal["I", "Q"] = "I") -> array[int]:
    """Add `by` to each of the numbers."""
    column = array(type_)
    for start in range(0, len(numbers), NUMBERS_AT_ONCE):
        native.extend_shifted(column, numbers[start : start + NUMBERS_AT_ONCE], by)
    return column
