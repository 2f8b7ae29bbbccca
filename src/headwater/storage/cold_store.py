"""The interface of a cold store: it saves the journal's data, and older bytes are read from it.

A storage mode is a journal and a cold store. The journal makes batches durable; data that is only there is also held in
memory (`UnsavedState`) for readers. A checkpoint moves it into the cold store, and then the journal is trimmed:

1. `freeze`, on the event loop in slices: select what this checkpoint saves.
2. `save`, a job of the worker: make it durable. It can be run again after a temporary error.
3. `publish`, on the event loop in slices: set the new extents of each stream, and free memory.

Between `freeze` and `publish` readers use the data in memory. There is one checkpoint at a time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

from headwater.core.records import Record
from headwater.storage.extents import NO_EXTENTS
from headwater.storage.interface import ImageOf
from headwater.storage.journal.segments import FileJournal
from headwater.storage.stream_data import ColdRuns, StreamData
from headwater.storage.worker import Job


class Step(enum.Enum):
    """The next step of a piece of work on the event loop: more of it, or a wait for a job."""

    MORE = enum.auto()
    WAIT = enum.auto()


Steps: TypeAlias = Iterator[Step]


class Checkpoint(NamedTuple):
    """The content of one checkpoint: everything up to record `lsn`."""

    lsn: int
    segment: int
    """The journal is needed from this segment on once the checkpoint is durable."""
    dirty: set[int]
    """Streams that changed since the previous checkpoint."""
    documents: dict[str, bytes | None]
    """Documents that changed, as of record `lsn`; None for one that was deleted."""
    removed: tuple[int, ...]
    """Streams removed permanently since the previous checkpoint."""


class Chore(NamedTuple):
    """Background work of a cold store: a job, and the callbacks for its result on the event loop."""

    what: str
    job: Job
    complete: Callable[[Any], Steps]
    failed: Callable[[BaseException], None]


class UnsavedState:
    """Data that is in the journal but not yet in the cold store, and where the data of every stream is.

    It belongs to the event loop; only `find` and `extents_of` may be called from other threads.
    """

    __slots__ = (
        "being_forgotten",
        "bytes",
        "cached_bytes",
        "deleted",
        "dirty",
        "documents",
        "frozen_bytes",
        "image_of",
        "lsn",
        "removed",
        "removed_bytes",
        "removed_ids",
        "streams",
    )

    def __init__(self) -> None:
        self.streams: dict[int, StreamData] = {}
        self.dirty: set[int] = set()
        self.documents: dict[str, bytes | None] = {}
        self.removed_ids: list[int] = []
        """Streams that were removed since the last checkpoint began."""
        self.deleted: set[int] = set()
        """Streams that were deleted since the last checkpoint began, but are kept for their forks."""
        self.removed: dict[int, StreamData] = {}
        """Removed streams that the last checkpoint still contains: their bytes stay until a checkpoint without them."""
        self.being_forgotten: dict[int, StreamData] = {}
        """Removed streams that the running checkpoint no longer contains."""
        self.removed_bytes = 0
        self.lsn = 0
        """The last record that was published."""
        self.bytes = 0
        self.frozen_bytes = 0
        self.cached_bytes = 0
        """Memory for data that the cold store has too, which is freed when it is needed. Not in `memory_bytes`."""
        self.image_of: ImageOf | None = None
        """Set while maintenance runs on the event loop."""

    @property
    def memory_bytes(self) -> int:
        return self.bytes + self.frozen_bytes

    def find(self, stream_id: int) -> StreamData | None:
        """The data of a stream, removed or not."""
        return self.streams.get(stream_id) or self.removed.get(stream_id) or self.being_forgotten.get(stream_id)

    def extents_of(self, stream_id: int) -> bytes:
        # The extents of a stream are replaced as a whole, never changed, so any thread may read them.
        stored = self.find(stream_id)
        return stored.extents if stored is not None else NO_EXTENTS

    def begin_checkpoint(self, segment: int) -> Checkpoint:
        checkpoint = Checkpoint(self.lsn, segment, self.dirty, self.documents, tuple(self.removed_ids))
        self.bytes -= sum(document_bytes(key, value) for key, value in self.documents.items())
        self.dirty = set()
        self.documents = {}
        self.removed_ids = []
        self.being_forgotten, self.removed, self.removed_bytes = self.removed, {}, 0
        self.deleted.clear()
        return checkpoint

    def end_checkpoint(self) -> None:
        self.being_forgotten = {}
        self.frozen_bytes = 0


class ColdStore(ColdRuns, Protocol):
    """Saved states and bytes of all streams."""

    save_after_s: float | None
    """A checkpoint begins when something has been unsaved for this long; None: only the amount matters."""

    def recover(self, unsaved: UnsavedState) -> Iterator[Record]:
        """Return the records that rebuild the catalog, from the cold store and the journal; fill `unsaved`."""

    def open_journal(self, *, segment_bytes: int, durable: bool) -> FileJournal:
        """After `recover`: repair the journal after a crash, and begin a new segment."""

    def name_of(self, stream_id: int) -> str:
        """Describe a stream for an error message, with its name if it is known."""

    def capture(self, stream_id: int, stored: StreamData, lsn: int) -> None:
        """Freeze a stream for the running checkpoint if necessary, before record `lsn` + 1 removes it."""

    def freeze(self, checkpoint: Checkpoint) -> Steps: ...

    def save(self, checkpoint: Checkpoint) -> Job: ...

    def publish(self, saved: Any) -> Steps: ...

    def next_chore(self) -> Chore | None: ...

    def refusal(self) -> str | None:
        """Why new writes should be refused before they begin, or None."""

    def busy(self) -> str | None:
        """Why new writes should be retried shortly, or None."""

    @property
    def failure(self) -> str | None:
        """Why nothing can be saved until a restart, or None."""

    def parts(self) -> dict[str, int]:
        """Figures about the files, as `headwater store stats` names them."""

    def finish(self) -> None:
        """Save what should not be left to the next start; called on a regular shutdown."""

    def close(self) -> None: ...


def document_bytes(key: str, value: bytes | None) -> int:
    """The approximate memory of an unsaved document."""
    return 200 + len(key) + len(value or b"")
