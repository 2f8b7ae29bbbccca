"""Read streams and read and publish their snapshots, over HTTP.

Invariant: a snapshot is published only if its state includes every message before that offset, and one that
is older than the latest snapshot of the stream is dropped.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from headwater.pipeline.fold.state import CONTENT_TYPE, FoldState, SnapshotFormatError
from headwater.spark import bounded_ranges
from headwater.spark.errors import DataGoneError, HeadwaterError, SourceRecreatedError, StreamMissingError
from headwater.spark.offsets import BEGINNING, at, split_token
from headwater.spark.options import ConnectionOptions
from headwater.spark.protocol import StreamsClient

log = logging.getLogger("headwater.pipeline")

_ATTEMPTS: Final = 5
"""How often a state is rebuilt because another client published a snapshot in the meantime."""
_OTHER_PUBLISHER: Final = "Check which other client publishes its snapshots."


class FoldError(HeadwaterError):
    """The stream cannot be folded."""


@functools.lru_cache(maxsize=16)
def snapshot_client(connection: ConnectionOptions) -> SnapshotClient:
    """The client of this process."""
    return SnapshotClient(connection)


class SnapshotClient(StreamsClient):
    """A client that can publish snapshots, which only streams of a bucket have."""

    def publish(self, stream: str, offset: str, body: bytes, content_type: str = CONTENT_TYPE) -> bool:
        """Publish a snapshot; return whether it is now the latest. False if there is a newer one, or no stream.

        Repeating it is safe: the same bytes at the same offset are the same snapshot.
        """
        try:
            self.publish_snapshot(stream, offset, body, content_type)
        except (DataGoneError, StreamMissingError) as passed:
            log.info("snapshot not published: %s", passed)
            return False
        return True

    def messages(self, stream: str, start: str, end: str) -> Iterator[bytes]:
        """The messages between two offsets."""
        if split_token(start) == split_token(end):
            return
        for run in bounded_ranges.read(self, bounded_ranges.span(stream, at(start), at(end))):
            yield from run.values.to_pylist()


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One row of a batch."""

    position: int
    offset: str
    """The offset after it."""
    value: bytes


@dataclass(frozen=True, slots=True)
class FoldBase:
    """A state to continue from, and its offset."""

    state: FoldState
    offset: str = BEGINNING

    @property
    def position(self) -> int:
        return split_token(self.offset)[0]


def latest_snapshot(client: SnapshotClient, stream: str) -> FoldBase:
    """The state in the stream's snapshot, or the empty state before its first message."""
    for _ in range(_ATTEMPTS):
        offset = client.head(stream).snapshot
        if offset is None:
            return FoldBase(FoldState())
        try:
            snapshot = client.snapshot(stream, offset)
        except StreamMissingError:
            # Superseded between the two requests, or the stream was deleted; HEAD says which.
            continue
        try:
            return FoldBase(FoldState.decoded(snapshot.body), offset)
        except SnapshotFormatError as error:
            raise FoldError(
                f"Stream {stream!r}: its snapshot at {offset} ({snapshot.content_type}) was not made by a fold:"
                f" {error}. Messages before it are deleted, so the stream cannot be folded; exclude it."
            ) from None
    raise FoldError(f"Stream {stream!r}: its snapshot changes faster than it can be read. {_OTHER_PUBLISHER}")


def state_at(
    client: SnapshotClient, stream: str, end: str, rows: list[StreamMessage] | None = None
) -> FoldState | None:
    """The state at `end`, from the latest snapshot and the messages after it.

    None if that snapshot is already at `end`, or if the stream that `end` belongs to was deleted.

    If the rows of a batch continue the snapshot, they are used instead of reading the messages again.
    """
    for _ in range(_ATTEMPTS):
        base = latest_snapshot(client, stream)
        if base.position >= split_token(end)[0]:
            return None
        if rows and rows[0].position <= base.position:
            return base.state.apply_all(row.value for row in rows if row.position >= base.position)
        try:
            return base.state.apply_all(client.messages(stream, base.offset, end))
        except SourceRecreatedError as recreated:
            log.warning("%s Not folded up to %s.", recreated, end)
            return None
        except DataGoneError as gone:
            if gone.earliest is None or client.head(stream).snapshot is not None:
                continue
            # Retention has deleted its first messages, as its configuration allows: fold the rest.
            log.warning("%s Folding from %s.", gone, gone.earliest)
            return FoldState().apply_all(client.messages(stream, gone.earliest, end))
    raise FoldError(f"Stream {stream!r}: it is trimmed faster than it can be read. {_OTHER_PUBLISHER}")
