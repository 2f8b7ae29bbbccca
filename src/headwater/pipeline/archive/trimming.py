"""Let the server delete what is archived, by publishing a snapshot: the only request that the protocol has for it.

A server keeps messages until a snapshot covers them. A trim publishes one at the archived offset: either the fold of
the stream, from which readers get the same state as from its messages, or a pointer to the archive.
Invariant: only messages that a commit of the archive names are trimmed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from headwater.pipeline.archive.files import ArchivedPosition
from headwater.pipeline.fold.snapshot_client import SnapshotClient, state_at
from headwater.spark.errors import StreamMissingError
from headwater.spark.offsets import are_of_two_streams, split_token
from headwater.spark.options import ConnectionOptions

log = logging.getLogger("headwater.pipeline")

POINTER_TYPE: Final = "application/vnd.headwater.archive+json"
_PARALLEL: Final = 8


class TrimMethod(StrEnum):
    POINTER = "pointer"
    FOLD = "fold"


def trim(
    connection: ConnectionOptions, method: TrimMethod, lake: Path, safe: Iterable[tuple[str, ArchivedPosition]]
) -> int:
    """Publish a snapshot at each of these offsets, unless the stream has a newer one; return how many it published."""
    client = SnapshotClient(connection)
    try:
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="headwater-trim") as pool:
            return sum(pool.map(lambda one: _trim(client, method, lake, *one), safe))
    finally:
        client.disconnect()


def _trim(client: SnapshotClient, method: TrimMethod, lake: Path, stream: str, place: ArchivedPosition) -> bool:
    try:
        head = client.head(stream)
        if are_of_two_streams(place.offset, head.offset):
            log.info("nothing to trim: stream %r was recreated after it was archived up to %s", stream, place.offset)
            return False
        last = head.snapshot
        if last is not None and split_token(last)[0] >= place.position:
            return False
        if method is TrimMethod.POINTER:
            return client.publish(stream, place.offset, pointer(lake, place), POINTER_TYPE)
        state = state_at(client, stream, place.offset)
        return state is not None and client.publish(stream, place.offset, state.encoded())
    except StreamMissingError as missing:
        log.info("nothing to trim: %s", missing)
        return False


def pointer(lake: Path, place: ArchivedPosition) -> bytes:
    """The snapshot that says where the messages before an offset are."""
    return msgspec.json.encode({"archive": str(lake), "offset": place.offset, "messages": place.position})
