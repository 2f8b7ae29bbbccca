"""A checkpoint of a pack store: save unsaved bytes in packs and unsaved states in the manifest.

It is fuzzy. A checkpoint covers everything up to its record; the streams that changed before it are frozen one by one,
while writes continue, and each is saved as of its own last record. That is correct because bytes, state and the number
of that record are read at the same time, and replay skips, for each stream, the records that its image includes.

The set of streams is not fuzzy: it is saved exactly as of the checkpoint's record, including streams that were removed
during the checkpoint, and without those created since. Later creations and deletions are replayed in order, because
what a deletion removes depends on the forks that exist at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Delete, Document, Image
from headwater.storage import extents
from headwater.storage.arrival_times import TimeTable
from headwater.storage.columns import shifted
from headwater.storage.extents import Extent
from headwater.storage.filesystem import Filesystem
from headwater.storage.journal.frames import read_batch
from headwater.storage.journal.replay import JournalReader
from headwater.storage.packs.manifest import Commit, Key, Manifest, SavedState
from headwater.storage.packs.pack import EXTENT_MAX_BYTES, PackInfo, PackWriter
from headwater.storage.packs.pack_set import BIG
from headwater.storage.tail import Tail

_STEP_EXTENTS: Final = 64
_BUCKETS: Final = 128
_STREAM_ID: Final = itemgetter(0)


class Frozen(NamedTuple):
    """A stream as of record `lsn`; only whether it is deleted is as of the checkpoint's record.

    Without an image (the stream was too busy, or removed too soon), its state is read from the journal.
    """

    stream_id: int
    lsn: int
    image: Image | None
    tail: Tail | None


class Plan(NamedTuple):
    """The content of a checkpoint. Saving it can be repeated after a failure: every attempt writes other files."""

    lsn: int
    segment: int
    frozen: list[Frozen]
    documents: dict[str, bytes | None]
    """The values as of record `lsn`; None for a removed document."""
    removed: tuple[int, ...]


class Saved(NamedTuple):
    """The result: the extents in which each frozen tail was saved."""

    blobs: list[tuple[int, bytes]]
    packs: tuple[PackInfo, ...]


class PackContext(NamedTuple):
    """The dependencies of the jobs of a pack store."""

    filesystem: Filesystem
    journal_directory: Path
    pack_directory: Path
    manifest: Manifest
    next_pack: Callable[[], int]
    extents_of: Callable[[int], bytes]
    """The current extents of a stream; empty if the manifest no longer has it. Can be called from any thread."""
    big_bytes: int


class PackPair:
    """The packs that one job fills: one for extents that will be merged later, one for large ones."""

    def __init__(self, context: PackContext, tier: int, born: int | None = None) -> None:
        self._context = context
        self._tier = tier
        self._born = born
        self._writers: dict[int, PackWriter] = {}

    def writer(self, size: int) -> PackWriter:
        """The pack for an extent of this size."""
        tier = BIG if size >= self._context.big_bytes else self._tier
        writer = self._writers.get(tier)
        if writer is None:
            number = self._context.next_pack()
            born = number if self._born is None else self._born
            writer = PackWriter(self._context.filesystem, self._context.pack_directory, number, tier, born)
            self._writers[tier] = writer
        return writer

    def finish(self) -> tuple[PackInfo, ...]:
        infos = tuple(writer.finish() for writer in self._writers.values())
        if infos:
            self._context.filesystem.sync_directory(self._context.pack_directory)
        return infos

    def abandon(self) -> None:
        for writer in self._writers.values():
            writer.abandon()


def save_checkpoint(context: PackContext, plan: Plan) -> Generator[None, None, Saved]:
    """The job of a checkpoint: write the packs, then the manifest that refers to them."""
    kept = yield from _states_to_save(context, plan)
    kept += [
        SavedState(key, plan.lsn, Document(key, value)) for key, value in plan.documents.items() if value is not None
    ]
    removed: list[Key] = [*plan.removed, *(key for key, value in plan.documents.items() if value is None)]
    known_removed = tuple(key for key in removed if key in context.manifest.at)
    blobs: list[tuple[int, bytes]] = []
    packs = PackPair(context, tier=0)
    try:
        tails = yield from _in_order(plan.frozen)
        for steps, (stream_id, tail) in enumerate(tails, 1):
            blobs.append((stream_id, extents.join(_save_tail(packs, stream_id, tail))))
            if steps % _STEP_EXTENTS == 0 or tail.size > context.big_bytes:
                yield
        del tails
        infos = packs.finish()
    except BaseException:
        packs.abandon()
        raise
    # From here the packs are kept: if this fails, the manifest may or may not refer to them after a crash.
    yield from context.manifest.save(Commit(True, plan.lsn, plan.segment, infos, (), known_removed), kept)
    while kept:
        # Freeing a hundred thousand states at once would block the event loop.
        del kept[-256:]
        yield
    return Saved(blobs, infos)


def _in_order(frozen: list[Frozen]) -> Generator[None, None, list[tuple[int, Tail]]]:
    """The tails by stream id. Ids are random, so their first bits divide them into equal buckets, sorted one by one."""
    buckets: list[list[tuple[int, Tail]]] = [[] for _ in range(_BUCKETS)]
    for steps, (stream_id, _, _, tail) in enumerate(frozen, 1):
        if tail is not None:
            buckets[stream_id * _BUCKETS >> 64].append((stream_id, tail))
        if steps % 256 == 0:
            yield
    tails: list[tuple[int, Tail]] = []
    for bucket in buckets:
        bucket.sort(key=_STREAM_ID)
        tails += bucket
        if len(bucket) > _STEP_EXTENTS:
            yield
    return tails


def _save_tail(packs: PackPair, stream_id: int, tail: Tail) -> list[Extent]:
    message_index, byte_position = tail.message_index, tail.byte_position
    size = tail.size
    if 0 < size <= EXTENT_MAX_BYTES:
        distances = shifted(tail.ends, -byte_position)
        pieces = tail.views(byte_position, tail.end_position)
        times = TimeTable(tail.time_runs(message_index, tail.end_index))
        return [packs.writer(size).add(stream_id, message_index, byte_position, pieces, distances, times)]
    saved = []
    while message_index < tail.end_index:
        end_index, end_position = tail.cut(message_index, byte_position, tail.end_index, EXTENT_MAX_BYTES)
        ends = tail.ends[message_index - tail.message_index : end_index - tail.message_index]
        distances = shifted(ends, -byte_position)
        pieces = tail.views(byte_position, end_position)
        times = TimeTable(tail.time_runs(message_index, end_index))
        saved.append(
            packs.writer(end_position - byte_position).add(
                stream_id, message_index, byte_position, pieces, distances, times
            )
        )
        message_index, byte_position = end_index, end_position
    return saved


def _states_to_save(context: PackContext, plan: Plan) -> Generator[None, None, list[SavedState]]:
    without_image = {each.stream_id: each.lsn for each in plan.frozen if each.image is None}
    found_in_journal = (yield from _from_journal(context, without_image, plan.lsn)) if without_image else {}
    kept = []
    for steps, (stream_id, lsn, image, tail) in enumerate(plan.frozen, 1):
        found = image if image is not None else found_in_journal[stream_id]
        assert tail is None or (found.message_index, found.byte_position) == (tail.end_index, tail.end_position)
        kept.append(SavedState(stream_id, lsn, found))
        if steps % 256 == 0:
            yield
    return kept


def _from_journal(
    context: PackContext, lsn_by_stream: dict[int, int], lsn: int
) -> Generator[None, None, dict[int, Image]]:
    """The state of streams as of given records: their last image, plus the later records of the journal."""
    catalog: Catalog[StreamState] = Catalog(StreamState)
    known: dict[int, int] = {}
    for stream_id in lsn_by_stream:
        kept = context.manifest.saved_state(stream_id)
        if kept is not None:
            catalog.apply(kept.state)
            known[stream_id] = kept.lsn
    reader = JournalReader(context.filesystem, context.journal_directory, context.manifest.segment)
    for frame in reader.batches(max(lsn_by_stream.values()), context.manifest.lsn):
        for logged in read_batch(frame):
            if not context.manifest.lsn < logged.lsn <= lsn_by_stream.get(logged.stream_id, 0):
                continue
            record = logged.borrowed_record
            assert not isinstance(record, Document)
            if isinstance(record, Delete):
                if logged.lsn <= lsn:
                    # The stream is kept for its forks. Recovery replays a deletion after the checkpoint: see `Frozen`.
                    catalog.apply(msgspec.structs.replace(catalog.by_id[record.id].image(), deleted=True))
            elif logged.lsn > known.get(record.id, 0):
                catalog.apply(record)
        yield
    return {stream_id: catalog.by_id[stream_id].image() for stream_id in lsn_by_stream}
