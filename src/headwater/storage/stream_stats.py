"""Statistics about the streams of a store."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.catalog import Catalog, StreamState
from headwater.core.floors import floors, own_start


@dataclass(frozen=True, slots=True)
class StreamStats:
    """The numbers and sizes of a store's streams, forks, documents and snapshots."""

    streams: int = 0
    forks: int = 0
    deleted_streams: int = 0
    """Deleted, but kept because forks read from them. They count among the streams."""
    documents: int = 0
    payload_bytes: int = 0
    """Message bytes that are kept; bytes that forks share are counted once."""
    snapshots: int = 0
    snapshot_bytes: int = 0


def stream_stats(catalog: Catalog[StreamState]) -> StreamStats:
    floor_of = floors(catalog)
    snapshots = {
        stream.snapshot.blob_id: stream.snapshot.size
        for stream in catalog
        if stream.snapshot is not None and not stream.deleted
    }
    return StreamStats(
        streams=len(catalog),
        forks=sum(stream.fork is not None for stream in catalog),
        deleted_streams=sum(stream.deleted for stream in catalog),
        documents=len(catalog.documents),
        payload_bytes=sum(
            stream.byte_position - own_start(stream, floor_of[stream.id]).byte_position for stream in catalog
        ),
        snapshots=len(snapshots),
        snapshot_bytes=sum(snapshots.values()),
    )
