"""Offsets as tests write them: by messages and bytes, whatever incarnation the server names.

Tests about incarnations are in tests/http/test_incarnations.py and tests/engine/test_incarnations.py.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"([0-9a-f]{16}_[0-9a-f]{16})(?:_[0-9a-f]{16})?", re.ASCII)


class OffsetText(str):
    """A token of two parts, which is valid input; it equals any whole token of the same place."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return NotImplemented
        found = _TOKEN.fullmatch(str.__str__(other))
        return found is not None and str.__eq__(found[1], str.__str__(self))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def offset_text(index: int, position: int) -> OffsetText:
    """The place after `index` messages and `position` stored bytes."""
    return OffsetText(f"{index:016x}_{position:016x}")


def offset_of(token: str) -> OffsetText:
    """The place that a token names, whichever way it is spelled."""
    found = _TOKEN.fullmatch(token)
    assert found is not None, f"{token!r} is not an offset of ours"
    return OffsetText(found[1])
