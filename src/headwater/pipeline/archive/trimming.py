"""Letting the server forget what is safe in the lake, by the one call that the protocol has for it: a snapshot.

A server keeps what no snapshot covers. So a trim publishes one at the archived offset: the stream's fold, which is as
good as its messages to whoever wants its state, or a pointer to the lake.
Invariant: nothing is trimmed that a commit of the lake does not name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from headwater.pipeline.archive.manifest import Archived
from headwater.pipeline.fold.remote import Publisher, state_at
from headwater.spark.errors import StreamMissing
from headwater.spark.offsets import are_of_two_streams, split_token
from headwater.spark.options import Connection

log = logging.getLogger("headwater.pipeline")

POINTER_TYPE: Final = "application/vnd.headwater.archive+json"
_PARALLEL: Final = 8


class Trim(StrEnum):
    POINTER = "pointer"
    FOLD = "fold"


def trim(connection: Connection, how: Trim, lake: Path, safe: Iterable[tuple[str, Archived]]) -> int:
    """Publish at each of these places, where the stream has nothing newer; how many were."""
    client = Publisher(connection)
    try:
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="headwater-trim") as pool:
            return sum(pool.map(lambda one: _trim(client, how, lake, *one), safe))
    finally:
        client.disconnect()


def _trim(client: Publisher, how: Trim, lake: Path, stream: str, place: Archived) -> bool:
    try:
        head = client.head(stream)
        if are_of_two_streams(place.offset, head.offset):
            log.info(
                "nothing to trim: stream %r was created again after it was archived up to %s", stream, place.offset
            )
            return False
        last = head.snapshot
        if last is not None and split_token(last)[0] >= place.position:
            return False
        if how is Trim.POINTER:
            return client.publish(stream, place.offset, pointer(lake, place), POINTER_TYPE)
        state = state_at(client, stream, place.offset)
        return state is not None and client.publish(stream, place.offset, state.encoded())
    except StreamMissing as missing:
        log.info("nothing to trim: %s", missing)
        return False


def pointer(lake: Path, place: Archived) -> bytes:
    """Says where the messages before an offset are now."""
    return msgspec.json.encode({"archive": str(lake), "offset": place.offset, "messages": place.position})
