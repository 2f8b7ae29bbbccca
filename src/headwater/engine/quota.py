"""How much all streams together hold, and the limits on it.

Content is message and snapshot bytes. Metadata is what the server keeps in memory for each stream, producer and
document, whatever the storage mode; it is counted by what one of each was measured to take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headwater.core.catalog import StreamState
from headwater.core.errors import MemoryFull, StreamFull, TooLarge, TooManyProducers
from headwater.core.records import Record
from headwater.engine.committer import record_bytes
from headwater.storage.interface import RECORD_MAX_BYTES

STREAM_BYTES: Final = 1536
"""An empty stream takes 890 bytes in `memory` and `file-fast` and 1,280 in `acid` (measured with 20,000 of them), and
the tables that hold it grow in large steps."""
PRODUCER_BYTES: Final = 512
"""A producer takes 210 to 470 bytes."""
DOCUMENT_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much the server takes in; 0 means no limit."""

    max_total_bytes: int = 0
    """Content and metadata together: for a store that holds both in memory."""
    max_stream_bytes: int = 0
    max_producers: int = 0
    """Producers that one stream remembers."""
    max_snapshot_bytes: int = 2**30
    max_metadata_bytes: int = 0
    """Metadata alone: for a store that holds content on disk."""
    max_fork_depth: int = 0
    """Sources that a fork may have above it."""


class Quota:
    __slots__ = ("_limits", "content_bytes", "metadata_bytes")

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.content_bytes = 0
        self.metadata_bytes = 0

    def check(self, content_bytes: int, metadata_bytes: int = 0) -> None:
        """Refuse what would go beyond a limit."""
        limit = self._limits.max_total_bytes
        held = self.content_bytes + self.metadata_bytes
        if limit and held + content_bytes + metadata_bytes > limit:
            raise MemoryFull(
                f"All streams together would grow beyond the limit of {limit} bytes (limits.max_memory_bytes); they"
                f" hold {self.content_bytes} bytes of content and {self.metadata_bytes} of metadata."
            )
        limit = self._limits.max_metadata_bytes
        if limit and metadata_bytes and self.metadata_bytes + metadata_bytes > limit:
            raise MemoryFull(
                f"The metadata of all streams would grow beyond the limit of {limit} bytes"
                f" (limits.max_metadata_bytes); it takes {self.metadata_bytes} bytes now."
            )

    def check_append(self, stream_bytes: int, content_bytes: int, metadata_bytes: int) -> None:
        """Refuse an append that would go beyond a limit, of its stream (which has `stream_bytes` now) or of all."""
        limits = self._limits
        if limits.max_stream_bytes and stream_bytes + content_bytes > limits.max_stream_bytes:
            self.check_stream(stream_bytes + content_bytes)
        if limits.max_total_bytes or metadata_bytes:
            self.check(content_bytes, metadata_bytes)

    def check_stream(self, size: int) -> None:
        """Refuse an append that would make one stream larger than its limit."""
        limit = self._limits.max_stream_bytes
        if limit and size > limit:
            raise StreamFull(f"The stream would have {size} bytes; the limit is {limit} (limits.max_stream_bytes).")

    def check_producers(self, known: int) -> None:
        """Refuse another producer in a stream that remembers as many as it may."""
        limit = self._limits.max_producers
        if limit and known >= limit:
            raise TooManyProducers(
                f"The stream has {known} producers, and {limit} is the limit (limits.max_producers_per_stream)."
            )


def checked_size(record: Record) -> int:
    """The size of a record in a journal. Refuses one that no journal can take, before anything depends on it."""
    size = record_bytes(record)
    if size > RECORD_MAX_BYTES:
        raise TooLarge(f"The request takes {size} bytes in the journal; one record can take {RECORD_MAX_BYTES}.")
    return size


def metadata_of(stream: StreamState) -> int:
    producers = len(stream.producers) if stream.producers is not None else 0
    return stream_bytes(stream.name) + PRODUCER_BYTES * producers


def stream_bytes(name: str) -> int:
    """The metadata of a new stream."""
    return STREAM_BYTES + len(name)


def document_bytes(key: str, value: bytes | None) -> int:
    return DOCUMENT_BYTES + len(key) + len(value) if value is not None else 0
