"""Extract the one sentence that says why a query failed from Spark's error text.

Invariant: the result is one line and is never empty.
"""

from __future__ import annotations

import re
from typing import Final

_LENGTH_MAX: Final = 1000
_OURS: Final = re.compile(r"^\W*(?:headwater|psycopg)\.[\w.]+: (.+)$", re.MULTILINE)
_PYTHON: Final = re.compile(r"^\s*(?:[A-Za-z_]\w*\.)*\w+Error: (.+)$", re.MULTILINE)


def error_sentence(error: BaseException | str) -> str:
    """The message of the error that one of our modules or the database driver raised; else the first line."""
    text = str(error)
    for pattern in (_OURS, _PYTHON):
        if found := pattern.findall(text):
            return str(found[-1]).strip()[:_LENGTH_MAX]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines:
        return lines[0][:_LENGTH_MAX]
    return text.strip() or type(error).__name__
