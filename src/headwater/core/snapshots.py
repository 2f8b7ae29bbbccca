"""Snapshots: where one may be published (extensions §2.2)."""

from __future__ import annotations

from headwater.core.errors import Conflict, InvalidOffset
from headwater.core.offsets import Offset, parse_token
from headwater.core.rules import check_retained


def check_snapshot_offset(token: str, earliest: Offset, tail: Offset) -> Offset:
    """The place that a snapshot stands for. Whether it is a boundary between messages is for the reader to say."""
    offset = parse_token(token)
    if offset is None:
        raise InvalidOffset(f"Snapshot offset {token!r} is malformed. Use one that the server returned.")
    check_retained(offset, earliest)
    if offset > tail:
        raise Conflict(f"Snapshot offset {token} lies beyond the tail, {tail}.")
    return offset
