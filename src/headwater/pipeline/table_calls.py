"""Find table functions in SQL, such as stream('chat/1'), and replace them with table names.

Invariant: only these calls with string arguments are replaced; quoted text, comments and the rest of the query are
unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_TEXT: Final = r"'(?:[^'\\]|\\.|'')*'"
_WORDS: Final = re.compile(
    rf"""
      (?: --[^\n]* | /\*.*?\*/ )
    | \b(?P<function> streams? | states? | snapshot | archive )
      \s* \( \s* (?P<arguments> {_TEXT} (?: \s*,\s* {_TEXT} )* ) \s* \)
    | {_TEXT} | "(?:[^"\\]|\\.)*" | `[^`]*`
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_ARGUMENT: Final = re.compile(_TEXT, re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)|''", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TableCall:
    function: str
    arguments: tuple[str, ...]


def rewritten(text: str, view: Callable[[TableCall], str]) -> str:
    """The text with each call replaced by the name that `view` returns."""

    def replaced(found: re.Match[str]) -> str:
        if found["function"] is None:
            return found[0]
        arguments = tuple(_unquoted(one) for one in _ARGUMENT.findall(found["arguments"]))
        return view(TableCall(found["function"].lower(), arguments))

    return _WORDS.sub(replaced, text)


def _unquoted(literal: str) -> str:
    return _ESCAPED.sub(lambda found: found[1] or "'", literal[1:-1])
