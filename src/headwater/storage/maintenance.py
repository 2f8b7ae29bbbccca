"""Tending: when checkpoints and rewrites happen, and how their results reach the readers.

All of this runs on the event loop, in slices of a few milliseconds; the long parts are jobs of the worker. A
checkpoint goes through three phases: *freezing* the streams that changed, *saving* (a job), and *telling* each stream
where its bytes lie now. Until a stream is told, it reads from what was frozen. One checkpoint at a time.
"""

from __future__ import annotations

import enum
import errno
import logging
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from headwater.core.records import Image
from headwater.storage.extents import NO_EXTENTS, join, merge
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import ImageOf, WriteFailedError
from headwater.storage.journal.segments import FileJournal
from headwater.storage.packs.checkpoint import Frozen, MaintenanceContext, Plan, Saved, save_checkpoint
from headwater.storage.packs.compaction import DamagedPackError, Rewritten, forget_packs, rewrite_packs
from headwater.storage.packs.images import is_large
from headwater.storage.packs.pack import pack_path
from headwater.storage.packs.pack_set import PackSet
from headwater.storage.stream_data import StreamData, memory_of
from headwater.storage.worker import Job, Outcome, Worker

log = logging.getLogger("headwater.storage")

SLICE_S: Final = 0.002
LONG_SLICE_S: Final = 0.01
"""While memory is full."""
OVERFULL: Final = 2
"""How many times `hot_tail_bytes` may be held in memory before new writes are refused for a moment."""
LOOK_EVERY: Final = 16
"""Streams that are dealt with between two looks at the clock."""
SEGMENTS_MAX: Final = 2
"""More log than this is saved even if little of it is data, so that a boot never has much to replay."""
REST_S: Final = 1.0
RETRY_S: Final = 1.0
REWRITE_RETRY_S: Final = 60.0
ASKS_MAX: Final = 8
"""How often a busy stream is asked for its state before it is read back from the log."""

_PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that go away: the attempt is given up and made again, in other files."""


class Step(enum.Enum):
    """What comes next in a piece of work: more of it, or nothing until somebody else is done."""

    MORE = enum.auto()
    WAIT = enum.auto()


Steps: TypeAlias = Iterator[Step]


class UnsavedState:
    """What is not saved yet, and so is held in memory. Belongs to the event loop."""

    __slots__ = (
        "bytes",
        "condemned",
        "condemned_bytes",
        "dirty",
        "documents",
        "doomed",
        "ended",
        "frozen_bytes",
        "gone",
        "lsn",
        "streams",
    )

    def __init__(self) -> None:
        self.streams: dict[int, StreamData] = {}
        self.dirty: set[int] = set()
        self.documents: dict[str, bytes | None] = {}
        self.gone: list[int] = []
        """Streams that were removed since the last checkpoint began."""
        self.ended: set[int] = set()
        """Streams that were deleted since the last checkpoint began, but live on for their forks."""
        self.condemned: dict[int, StreamData] = {}
        """What the manifest still knows of streams that are gone: their bytes stay until it has forgotten them."""
        self.doomed: dict[int, StreamData] = {}
        """Those that the checkpoint under way makes it forget."""
        self.condemned_bytes = 0
        self.lsn = 0
        """The last record that was absorbed."""
        self.bytes = 0
        self.frozen_bytes = 0

    def find(self, stream_id: int) -> StreamData | None:
        """What there is of a stream, be it gone or not. Safe from any thread."""
        return self.streams.get(stream_id) or self.condemned.get(stream_id) or self.doomed.get(stream_id)

    def extents_of(self, stream_id: int) -> bytes:
        # From any thread: the extents of a stream are replaced as a whole, never changed.
        stored = self.find(stream_id)
        return stored.extents if stored is not None else NO_EXTENTS


class Maintenance:
    def __init__(
        self,
        context: MaintenanceContext,
        unsaved: UnsavedState,
        pack_set: PackSet,
        writer: FileJournal,
        worker: Worker,
        *,
        hot_tail_bytes: int,
        busy_floor_bytes: int,
        segments_max: int = SEGMENTS_MAX,
        look_every: int = LOOK_EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._unsaved = unsaved
        self._pack_set = pack_set
        self._writer = writer
        self._worker = worker
        self._hot_max = hot_tail_bytes
        self._overfull_bytes = max(OVERFULL * hot_tail_bytes, busy_floor_bytes)
        self._segments_max = segments_max
        self._look_every = look_every
        self._clock = clock
        self._steps: Steps | None = None
        self._image_of: ImageOf | None = None
        self._to_freeze: set[int] = set()
        self._frozen: list[Frozen] = []
        self._chores: Steps | None = None
        self._preparing: Outcome | None = None
        self._prepare_at = 0.0
        self._look_at = 0.0
        self._seen_lsn = -1
        self.asked = False
        """Set to have a checkpoint made as soon as can be."""
        self.trouble: str | None = None
        """Why saving is held up for the moment, if it is."""

    @property
    def crowded(self) -> bool:
        """Whether memory is so full that the checkpoint under way should hurry."""
        return self._unsaved.bytes + self._unsaved.frozen_bytes >= self._hot_max

    @property
    def overfull(self) -> bool:
        """Whether memory is so full that no new data should be accepted."""
        return self._unsaved.bytes + self._unsaved.frozen_bytes >= self._overfull_bytes

    def maintain(self, image_of: ImageOf) -> None:
        unsaved = self._unsaved
        if self._writer.failure is not None:
            return
        self._prepare_segment()
        if self._steps is None and (
            self.asked
            or 2 * unsaved.bytes >= self._hot_max
            or 2 * unsaved.condemned_bytes >= self._hot_max
            or len(self._writer.segments) > self._segments_max
        ):
            self.asked = False
            self._steps = self._checkpoint()
        if self._steps is not None:
            self._image_of = image_of
            self._steps = self._advance(self._steps)
            self._image_of = None
        now = self._clock()
        if self._chores is None and now >= self._look_at and self._steps is None:
            self._look_at = now + REST_S
            self._chores = self._chore()
        if self._chores is not None:
            self._chores = self._advance(self._chores)

    def _advance(self, steps: Steps) -> Steps | None:
        """Continue for a slice, or until there is something to wait for."""
        crowded = self.crowded
        self._worker.hurry = crowded
        deadline = self._clock() + (LONG_SLICE_S if crowded else SLICE_S)
        for step in steps:
            if step is Step.WAIT or self._clock() >= deadline:
                return steps
        return None

    # -- a checkpoint ----------------------------------------------------------------------------------------------

    def _checkpoint(self) -> Steps:
        unsaved = self._unsaved
        lsn = unsaved.lsn
        segment = max(segment.number for segment in self._writer.segments if segment.first_lsn <= lsn + 1)
        documents, unsaved.documents = unsaved.documents, {}
        unsaved.bytes -= sum(document_bytes(key, value) for key, value in documents.items())
        gone, unsaved.gone = tuple(unsaved.gone), []
        unsaved.doomed, unsaved.condemned, unsaved.condemned_bytes = unsaved.condemned, {}, 0
        unsaved.ended.clear()
        self._to_freeze, unsaved.dirty = unsaved.dirty, set()
        yield from self._freeze()
        frozen, self._frozen = self._frozen, []
        plan = Plan(lsn, segment, frozen, documents, gone)
        saved: Saved | None = None
        while saved is None:
            saved = yield from self._save(plan)
            if self._writer.failure is not None:
                return
        yield from self._tell(saved, plan.frozen)
        for stored in unsaved.doomed.values():
            self._pack_set.release(stored.extents)
        unsaved.doomed = {}
        unsaved.frozen_bytes = 0
        self._look_at = 0.0

    def _freeze(self) -> Steps:
        """Take each stream's bytes and state in the same moment. Busy ones are asked again, and at last not asked."""
        for asks in range(ASKS_MAX, -1, -1):
            for steps, stream_id in enumerate(tuple(self._to_freeze), 1):
                # A stream that is gone since was captured when it went.
                large = stream_id in self._to_freeze and self._freeze_one(stream_id, insist=not asks)
                if large or steps % self._look_every == 0:
                    yield Step.MORE
            if not self._to_freeze:
                break
            yield Step.WAIT

    def _freeze_one(self, stream_id: int, *, insist: bool) -> bool:
        """Returns whether that took noticeably long."""
        unsaved = self._unsaved
        assert self._image_of is not None
        image = self._image_of(stream_id)
        if image is None and not insist:
            return False
        stored = unsaved.streams[stream_id]
        assert image is None or (image.message_index, image.byte_position) == stored.end
        if stream_id not in unsaved.ended:
            unsaved.dirty.discard(stream_id)
        elif image is not None:
            # Its end is left to the replay now, and to the next checkpoint then.
            image = msgspec.structs.replace(image, deleted=False)
        self._set_aside(stream_id, stored, unsaved.lsn, image)
        return is_large(image)

    def capture(self, stream_id: int, stored: StreamData, lsn: int) -> None:
        """A stream is about to be removed, and was as given after record `lsn`: the last moment to save it as it was.

        A checkpoint under way has to know it if it was there when that began.
        """
        if stream_id in self._to_freeze:
            self._set_aside(stream_id, stored, lsn, None)

    def _set_aside(self, stream_id: int, stored: StreamData, lsn: int, image: Image | None) -> None:
        tail = stored.freeze()
        size = memory_of(tail)
        self._unsaved.bytes -= size
        self._unsaved.frozen_bytes += size
        self._to_freeze.discard(stream_id)
        self._frozen.append(Frozen(stream_id, lsn, image, tail))

    def _save(self, plan: Plan) -> Generator[Step, None, Saved | None]:
        outcome = self._worker.submit(save_checkpoint(self._context, plan), urgent=True)
        while not outcome.done:
            yield Step.WAIT
        error = outcome.error
        if error is None:
            self.trouble = None
            saved: Saved = outcome.result
            return saved
        if not (isinstance(error, OSError) and error.errno in _PASSING):
            log.critical("a checkpoint failed, no more writes are taken: %s", error, exc_info=error)
            self._writer.fail(f"Saving a checkpoint failed: {error}")
            return None
        log.error("a checkpoint failed and will be tried again: %s", error)
        self.trouble = f"Stored data cannot be saved for the moment: {error}"
        again_at = self._clock() + RETRY_S
        while self._clock() < again_at:
            yield Step.WAIT
        return None

    def _tell(self, saved: Saved, frozen: list[Frozen]) -> Steps:
        unsaved = self._unsaved
        for info in saved.packs:
            self._pack_set.add(info)
        for steps, (stream_id, blob) in enumerate(saved.blobs, 1):
            stored = unsaved.find(stream_id)
            assert stored is not None
            unsaved.frozen_bytes -= memory_of(stored.frozen)
            self._pack_set.hold(blob)
            stored.extents += blob
            stored.frozen = None
            stored.trim_extents(self._pack_set)
            if steps % self._look_every == 0:
                yield Step.MORE
        self._pack_set.settle(saved.packs)
        while frozen:
            # Memory is given back in slices too: it takes as long as the rest.
            large = is_large(frozen.pop().image)
            del saved.blobs[-1:]
            if large or len(frozen) % self._look_every == 0:
                yield Step.MORE

    # -- the next segment ------------------------------------------------------------------------------------------

    def _prepare_segment(self) -> None:
        """See to it that the file of the next log segment is there before it is needed."""
        outcome = self._preparing
        if outcome is not None and outcome.done:
            self._preparing = None
            error = outcome.error
            if isinstance(error, OSError) and error.errno in _PASSING:
                log.warning("the next log segment cannot be created yet: %s", error)
                self._prepare_at = self._clock() + RETRY_S
            elif error is not None:
                log.critical("the next log segment cannot be created, no more writes are taken: %s", error)
                self._writer.fail(f"Creating the next log segment failed: {error}")
        if self._preparing is None and self._writer.wants_next and self._clock() >= self._prepare_at:
            # Before a checkpoint that is being saved: it may take longer than the segment lasts.
            self._preparing = self._worker.submit(_prepare(self._writer), urgent=True, first=True)

    # -- chores ----------------------------------------------------------------------------------------------------

    def _chore(self) -> Steps:
        """Whatever else there is to do, one thing at a time."""
        if self._seen_lsn == self._unsaved.lsn and not self._writer.at_rest and self._writer.failure is None:
            outcome = self._worker.submit(_rest(self._writer), urgent=False)
            while not outcome.done:
                yield Step.WAIT
            if outcome.error is not None:
                log.critical("no more writes are taken: %s", outcome.error)
        self._seen_lsn = self._unsaved.lsn
        while self._writer.failure is None:
            if dead := self._pack_set.dead():
                succeeded = yield from self._rewrite(forget_packs(self._context, dead), dead)
            elif (rewrite := self._pack_set.next_rewrite()) is not None:
                numbers = tuple(info.number for info in rewrite.sources)
                succeeded = yield from self._rewrite(rewrite_packs(self._context, rewrite), numbers)
            else:
                return
            if not succeeded:
                return

    def _rewrite(self, job: Job, numbers: tuple[int, ...]) -> Generator[Step, None, bool]:
        outcome = self._worker.submit(job, urgent=False)
        while not outcome.done:
            yield Step.WAIT
        error = outcome.error
        if error is not None:
            log.error("packs %s could not be rewritten: %s", list(numbers), error)
            if isinstance(error, WriteFailedError):
                self._writer.fail(str(error))
            elif isinstance(error, DamagedPackError):
                # The others can still be rewritten.
                self._pack_set.spare([error.number])
            elif not isinstance(error, OSError):
                self._pack_set.spare(numbers)
            self._look_at = self._clock() + REWRITE_RETRY_S
            return False
        rewritten: Rewritten = outcome.result
        for info in rewritten.added:
            self._pack_set.add(info)
        for steps, move in enumerate(rewritten.moves, 1):
            stored = self._unsaved.find(move.stream_id)
            before = stored.extents if stored is not None else NO_EXTENTS
            after = merge(before, move.merged)
            if stored is not None and after != before:
                stored.extents = after
                self._pack_set.hold(join((move.merged,)))
            if steps % self._look_every == 0:
                yield Step.MORE
        self._pack_set.settle(rewritten.added)
        for number in rewritten.dropped:
            self._pack_set.remove(number)
        paths = [pack_path(self._context.pack_directory, number) for number in rewritten.dropped]
        outcome = self._worker.submit(_unlink(self._context.filesystem, paths), urgent=False)
        while not outcome.done:
            yield Step.WAIT
        return True


def document_bytes(key: str, value: bytes | None) -> int:
    """About how much memory an unsaved document takes."""
    return 200 + len(key) + len(value or b"")


def _prepare(writer: FileJournal) -> Generator[None, None, None]:
    writer.prepare()
    yield


def _rest(writer: FileJournal) -> Generator[None, None, None]:
    writer.rest()
    yield


def _unlink(filesystem: Filesystem, paths: list[Path]) -> Generator[None, None, None]:
    for path in paths:
        try:
            filesystem.unlink(path)
        except OSError as error:
            log.warning("%s is no longer needed but stays until the next start: %s", path, error)
        yield
