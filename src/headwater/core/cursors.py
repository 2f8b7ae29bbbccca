"""Cursors: values that make successive live requests differ, so that no cache answers them in a loop.

The cursor is the number of the current interval since a fixed epoch. A client that already holds that number or a
later one gets a strictly greater one, advanced by a random jitter (protocol §8.1). A cursor never decreases from
one request to the next; within one response the event reader keeps the last one that it sent.
"""

from __future__ import annotations

import re
from typing import Final

EPOCH_MS: Final = 1_728_432_000_000
"""2024-10-09T00:00:00Z."""
JITTER_MAX_SECS: Final = 3600
DIGITS_MAX: Final = 32
"""Longer cursors are not converted to numbers. The server's own need ten digits at most for a thousand years; clients
may start with any number, such as 2^53 - 1."""

_CURSOR: Final = re.compile(r"[0-9]+", re.ASCII)


def next_cursor(now_ms: int, interval_secs: int, echoed: str | None, jitter: float) -> str:
    """The cursor for a live response, strictly ahead of the one that the client echoed, if it is one.

    `jitter` is a random number in [0, 1).
    """
    current = max(0, (now_ms - EPOCH_MS) // (interval_secs * 1000))
    if echoed is None or _CURSOR.fullmatch(echoed) is None:
        return str(current)
    digits = echoed.lstrip("0")
    if len(digits) > DIGITS_MAX:
        # Ten times the value, without arithmetic on numbers of unlimited length.
        return f"{digits}0"
    if int(digits or 0) < current:
        return str(current)
    step_secs = 1 + int(jitter * JITTER_MAX_SECS)
    return str(int(digits or 0) + max(1, step_secs // interval_secs))


def is_later(cursor: str, other: str) -> bool:
    """Whether one cursor of the server is later than another, without converting numbers of unlimited length."""
    return (len(cursor), cursor) > (len(other), other)
