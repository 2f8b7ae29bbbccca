"""Offsets in a shape's log: `-1`, `0_n` within the snapshot, `0_inf` after it, then `{commit LSN}_{position}`.

The client builds its own offset from an up-to-date message, `{LSN}_0`. Therefore positions of changes begin with 1, and
that LSN is always the end of a transaction, which precedes all later commits. Invariant: offsets sort in log order.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_REAL: Final = re.compile(r"(\d{1,20})_(\d{1,10}|inf)", re.ASCII)
_ENDLESS: Final = 1 << 62


class LogOffset(NamedTuple):
    lsn: int
    position: int

    def __str__(self) -> str:
        if self.lsn < 0:
            return "-1"
        return f"{self.lsn}_{'inf' if self.position == _ENDLESS else self.position}"

    @property
    def in_snapshot(self) -> bool:
        return self.lsn <= 0 and self.position != _ENDLESS


BEFORE_ALL: Final = LogOffset(-1, 0)
AFTER_SNAPSHOT: Final = LogOffset(0, _ENDLESS)


def parse_offset(text: str) -> LogOffset | None:
    """Parse an offset; None if the text is not valid."""
    if text == "-1":
        return BEFORE_ALL
    found = _REAL.fullmatch(text)
    if found is None:
        return None
    lsn = int(found[1])
    if found[2] == "inf":
        return AFTER_SNAPSHOT if lsn == 0 else None
    return LogOffset(lsn, int(found[2]))
