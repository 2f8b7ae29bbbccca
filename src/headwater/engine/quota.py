"""The total size of all streams, and the limits on it.

Content is message and snapshot bytes. Metadata is the memory for each stream, producer and document, in every storage
mode; it is estimated from measured sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headwater.core.catalog import StreamState
from headwater.core.errors import MemoryFull, PayloadTooLarge, StreamFull
from headwater.core.records import Append, Record
from headwater.engine.committer import LENGTH_BYTES, RECORD_OVERHEAD_BYTES, record_bytes
from headwater.engine.namespaces import NamespaceRule, Namespaces
from headwater.storage.interface import RECORD_MAX_BYTES

STREAM_BYTES: Final = 1536
"""An empty stream uses 890 bytes in `memory` and `file-fast` and 1,280 in `acid` (measured with 20,000 of them), and
the tables that hold it grow in large steps."""
PRODUCER_BYTES: Final = 512
"""A producer uses 250 to 510 bytes."""
DOCUMENT_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the server; 0 means no limit."""

    max_total_bytes: int = 0
    """Content and metadata together: for a store that holds both in memory."""
    max_stream_bytes: int = 0
    max_producers: int = 0
    """Producers of one stream."""
    producer_idle_days: int = 7
    """Days without an append after which a producer may be evicted at that limit."""
    max_snapshot_bytes: int = 2**30
    max_metadata_bytes: int = 0
    """Metadata alone: for a store that holds content on disk."""
    max_fork_depth: int = 0
    """Maximum depth of a chain of forks."""
    max_leases: int = 10_000
    """Writer leases of all streams."""
    max_lease_ms: int = 3_600_000
    max_followed_streams: int = 100_000
    """Streams that followers of many streams follow together."""
    namespaces: NamespaceRule | None = None


class Quota:
    __slots__ = (
        "_limits",
        "_max_stream_bytes",
        "_max_total_bytes",
        "_watched_from",
        "_watched_to",
        "content_bytes",
        "content_elsewhere",
        "metadata_bytes",
        "metadata_elsewhere",
        "namespaces",
        "on_change",
    )

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._max_stream_bytes = limits.max_stream_bytes
        self._max_total_bytes = limits.max_total_bytes
        rule = limits.namespaces
        self.namespaces = Namespaces(rule) if rule is not None and rule.limits_anything else None
        """The quotas of namespaces, if there are any."""
        self.content_bytes = 0
        self.metadata_bytes = 0
        self.content_elsewhere = 0
        """Content of other workers of the server."""
        self.metadata_elsewhere = 0
        self._watched_from, self._watched_to = -sys.maxsize, sys.maxsize
        self.on_change: Callable[[], None] | None = None
        """Called when the limited bytes are not what `watch` expects."""

    def watch(self, content_bytes: int, metadata_bytes: int, parts: int) -> None:
        """Call `on_change` when usage differs from these values by more than 1/`parts` of the remaining quota."""
        limit = self._limits.max_total_bytes or self._limits.max_metadata_bytes
        if not limit or self.on_change is None:
            return
        expected = content_bytes + metadata_bytes if self._limits.max_total_bytes else metadata_bytes
        elsewhere = self.metadata_elsewhere + (self.content_elsewhere if self._limits.max_total_bytes else 0)
        unseen = max(0, limit - expected - elsewhere) // parts
        self._watched_from, self._watched_to = expected - unseen, expected + unseen
        self.count(0, 0)

    def check(self, content_bytes: int, metadata_bytes: int = 0) -> None:
        """Refuse additions that would exceed a limit."""
        limit = self._limits.max_total_bytes
        content, metadata = self.content_bytes + self.content_elsewhere, self.metadata_bytes + self.metadata_elsewhere
        held = content + metadata
        if limit and held + content_bytes + metadata_bytes > limit:
            raise MemoryFull(
                f"All streams together would exceed the limit of {limit} bytes (limits.max_memory_bytes); they"
                f" hold {content} bytes of content and {metadata} of metadata. Delete streams, raise the limit, or"
                " use a"
                " storage mode on disk."
            )
        limit = self._limits.max_metadata_bytes
        if limit and metadata_bytes and metadata + metadata_bytes > limit:
            raise MemoryFull(
                f"The metadata of all streams would exceed the limit of {limit} bytes"
                f" (limits.max_metadata_bytes); it uses {metadata} bytes now. Delete streams, or raise the limit."
            )

    def add(self, name: str, content_bytes: int, metadata_bytes: int, streams: int) -> None:
        """Count additions of a stream, or removals with negative numbers."""
        # `count` inlined: every append passes here.
        self.content_bytes += content_bytes
        self.metadata_bytes += metadata_bytes
        limited = self.metadata_bytes + self.content_bytes if self._max_total_bytes else self.metadata_bytes
        if not self._watched_from <= limited <= self._watched_to and self.on_change is not None:
            self.on_change()
        if self.namespaces is not None:
            self.namespaces.add(name, size=content_bytes, streams=streams)

    def count(self, content_bytes: int, metadata_bytes: int) -> None:
        """Count additions that belong to no namespace, or removals with negative numbers."""
        self.content_bytes += content_bytes
        self.metadata_bytes += metadata_bytes
        limited = self.metadata_bytes + self.content_bytes if self._max_total_bytes else self.metadata_bytes
        if not self._watched_from <= limited <= self._watched_to and self.on_change is not None:
            self.on_change()

    def trimmed(self, name: str, content_bytes: int) -> None:
        """Count bytes that were dropped from a stream."""
        self.add(name, -content_bytes, 0, 0)

    def check_create(self, name: str, content_bytes: int, metadata_bytes: int) -> None:
        if self.namespaces is not None:
            self.namespaces.check_create(name, content_bytes)
        self.check(content_bytes, metadata_bytes)

    def check_append(self, name: str, stream_bytes: int, content_bytes: int, metadata_bytes: int) -> None:
        """Refuse an append that would exceed a limit; its stream has `stream_bytes` now."""
        if self.namespaces is not None:
            self.namespaces.check_bytes(name, content_bytes)
        if self._max_stream_bytes and stream_bytes + content_bytes > self._max_stream_bytes:
            self.check_stream(stream_bytes + content_bytes)
        # `check` inlined for the usual case: every append passes here.
        held = self.content_bytes + self.content_elsewhere + self.metadata_bytes + self.metadata_elsewhere
        if metadata_bytes or (self._max_total_bytes and held + content_bytes > self._max_total_bytes):
            self.check(content_bytes, metadata_bytes)

    def take(self, stream_bytes: int, content_bytes: int) -> None:
        """`check_append` and `add` in one call, for content of a stream in a server without quotas of namespaces."""
        content = self.content_bytes + content_bytes
        if self._max_stream_bytes and stream_bytes + content_bytes > self._max_stream_bytes:
            self.check_stream(stream_bytes + content_bytes)
        limited = self.metadata_bytes
        if self._max_total_bytes:
            limited += content
            if limited + self.content_elsewhere + self.metadata_elsewhere > self._max_total_bytes:
                self.check(content_bytes)
        self.content_bytes = content
        if not self._watched_from <= limited <= self._watched_to and self.on_change is not None:
            self.on_change()

    def check_stream(self, size: int) -> None:
        """Refuse an append that would make one stream larger than its limit."""
        limit = self._limits.max_stream_bytes
        if limit and size > limit:
            raise StreamFull(
                f"The stream would have {size} bytes; the limit is {limit} (limits.max_stream_bytes). Continue in"
                " another"
                " stream, or raise the limit."
            )


def checked_size(record: Record) -> int:
    """The size of a record in a journal; refuses one that is too large, before anything depends on it."""
    if type(record) is Append:
        # `record_bytes` inlined: every append passes here.
        size = RECORD_OVERHEAD_BYTES + len(record.payload) + LENGTH_BYTES * len(record.lengths)
    else:
        size = record_bytes(record)
    if size > RECORD_MAX_BYTES:
        raise PayloadTooLarge(
            f"The request needs {size} bytes in the journal; the limit of a record is {RECORD_MAX_BYTES}. Split it into"
            " several appends."
        )
    return size


def metadata_of(stream: StreamState) -> int:
    producers = len(stream.producers) if stream.producers is not None else 0
    sequence = len(stream.stream_seq) if stream.stream_seq is not None else 0
    return stream_bytes(stream.name, stream.type.header) + PRODUCER_BYTES * producers + sequence


def stream_bytes(name: str, content_type: str) -> int:
    """The metadata of a new stream. Its texts are counted, because a client chooses how long they are."""
    return STREAM_BYTES + len(name) + len(content_type)


def document_bytes(key: str, value: bytes | None) -> int:
    return DOCUMENT_BYTES + len(key) + len(value) if value is not None else 0
