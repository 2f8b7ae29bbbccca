"""Snapshots: where one may be published (extensions §2.2)."""

from __future__ import annotations

from headwater.core.errors import Conflict
from headwater.core.offsets import Offset
from headwater.core.rules import check_retained


def check_snapshot_offset(stream_id: int, offset: Offset, earliest: Offset, tail: Offset) -> None:
    """A snapshot lies between the earliest retained offset and the tail. The reader checks message boundaries."""
    check_retained(stream_id, offset, earliest)
    if offset > tail:
        raise Conflict(
            f"Snapshot offset {offset} is after the end of the stream, {tail}; use an offset that a read returned."
        )
