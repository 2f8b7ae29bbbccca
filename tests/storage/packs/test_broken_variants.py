"""Check the checkers: each store with a deliberate fault must be detected.

A variant breaks one rule of the design. If the simulations and the failing calls do not detect it, they do not test
that rule, and this test fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.storage.cold_store import Checkpoint, UnsavedState
from headwater.storage.extents import Extent
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import Committed, StorageError
from headwater.storage.journal import next_segment, replay
from headwater.storage.journal.frames import FRAME, Frame
from headwater.storage.journal.next_segment import NextSegment, PreparedFile
from headwater.storage.journal.replay import Replay
from headwater.storage.journal.replay import renew as true_renew
from headwater.storage.journal.segments import FileJournal
from headwater.storage.journaled_store import JournaledStorage
from headwater.storage.maintenance import Maintenance
from headwater.storage.packs import checkpoint, compaction, manifest, pack_store
from headwater.storage.packs.checkpoint import PackContext, Plan
from headwater.storage.packs.manifest import Commit, Manifest, SavedState
from headwater.storage.packs.pack import PackInfo, PackWriter
from headwater.storage.packs.pack_set import PackSet
from headwater.storage.worker import Job
from tests.storage import faulty_filesystem
from tests.storage.faulty_filesystem import FaultyFilesystem
from tests.storage.packs.test_checkpoints import (
    Bench,
    check_order_of_deletions,
    check_packs_are_counted_before_they_are_checked,
)
from tests.storage.packs.test_failing_calls import clean_calls, fail_call
from tests.storage.packs.test_renewal import SEEDS
from tests.storage.packs.test_renewal import (
    test_a_batch_read_back_after_a_failed_sync_survives_a_power_cut as a_failed_sync_and_a_power_cut,
)
from tests.storage.packs.test_traps import (
    test_t3_torn_write_to_an_idle_stream_is_not_readable as torn_writes_to_a_quiet_stream,
)
from tests.storage.simulation import packs_of, run_seeds

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Variant:
    broken: Break
    caught_by: Callable[[], object]


def crashes() -> None:
    run_seeds(range(2000, 2150), generations=4)


def more_crashes() -> None:
    """Check more histories, for faults that only one in a hundred shows."""
    run_seeds(range(2150, 2400), generations=4)


def failing_calls() -> None:
    for number in range(1, clean_calls() + 1):
        fail_call(number, 5)


def directed() -> None:
    check_order_of_deletions(Bench())


def packs_being_checked() -> None:
    check_packs_are_counted_before_they_are_checked(Bench())


def failed_syncs() -> None:
    for seed in SEEDS:
        a_failed_sync_and_a_power_cut(seed)


def nothing(*_: object) -> None:
    """Do nothing: replaces a step that is omitted."""


# -- the log -----------------------------------------------------------------------------------------------------------


def segments_that_share_a_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("secrets.randbits", lambda _: 7)


def segment_started_while_it_is_filled(patch: pytest.MonkeyPatch) -> None:
    take = NextSegment.take

    def hasty(self: NextSegment) -> PreparedFile | None:
        filling, self._is_filling = self._is_filling, False
        taken = take(self)
        self._is_filling = filling
        return taken

    patch.setattr(NextSegment, "take", hasty)
    patch.setattr(NextSegment, "is_ready", property(lambda self: self._is_named))
    patch.setattr(next_segment, "FILL_STEP_BYTES", 512)


def no_sync_of_the_log(patch: pytest.MonkeyPatch) -> None:
    sync = faulty_filesystem._FaultyAppender.sync

    def skip(self: Any) -> None:
        if not str(self._path).endswith(".log"):
            sync(self)

    patch.setattr(faulty_filesystem._FaultyAppender, "sync", skip)


def acknowledged_before_written(patch: pytest.MonkeyPatch) -> None:
    write = JournaledStorage.write
    late: dict[JournaledStorage, list[Committed]] = {}

    def lazy(self: JournaledStorage, batch: Sequence[Committed]) -> None:
        before = late.pop(self, None)
        if before is not None:
            write(self, before)
        late[self] = list(batch)

    patch.setattr(JournaledStorage, "write", lazy)


def batches_that_can_be_split(patch: pytest.MonkeyPatch) -> None:
    write = FileJournal.append

    def one_by_one(self: FileJournal, batch: Sequence[Committed]) -> None:
        for committed in batch:
            write(self, [committed])

    patch.setattr(FileJournal, "append", one_by_one)


def checksums_ignored(patch: pytest.MonkeyPatch) -> None:
    def trusting(data: memoryview, at: int, salt: int) -> Frame | None:
        body = at + FRAME.size
        if body > len(data):
            return None
        found_salt, _, length, number, count = FRAME.unpack_from(data, at)
        end = body + length
        if found_salt != salt or end > len(data):
            return None
        return Frame(at, end, number, count, data[body:end])

    patch.setattr(replay, "read_frame", trusting)


def renewed_by(patch: pytest.MonkeyPatch, renew: Callable[[Filesystem, Path, int], None]) -> None:
    for module in (replay, manifest):
        patch.setattr(module, "renew", renew)


def torn_tail_left_in_place(patch: pytest.MonkeyPatch) -> None:
    renewed_by(patch, lambda filesystem, path, _: true_renew(filesystem, path, filesystem.size(path)))


def synced_in_place_at_boot(patch: pytest.MonkeyPatch) -> None:
    def sync(filesystem: Filesystem, path: Path, size: int) -> None:
        if filesystem.size(path) > size:
            filesystem.truncate(path, size)
        filesystem.sync(path)
        filesystem.sync_directory(path.parent)

    renewed_by(patch, sync)


def no_sync_at_boot(patch: pytest.MonkeyPatch) -> None:
    synced_in_place_at_boot(patch)
    patch.setattr(FaultyFilesystem, "sync", nothing)


def segments_re_created_at_boot(patch: pytest.MonkeyPatch) -> None:
    create = FaultyFilesystem.create

    def over(self: FaultyFilesystem, path: Path) -> Any:
        if self._find(path) is not None:
            self._folder(path.parent).change({path.name: None})
        return create(self, path)

    patch.setattr(FaultyFilesystem, "create", over)
    patch.setattr(Replay, "next_number", property(lambda self: self.first_number))


def no_sync_of_directories(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FaultyFilesystem, "sync_directory", nothing)


def writes_continue_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FileJournal, "fail", nothing)
    patch.setattr(FileJournal, "_fail", lambda _, error: StorageError(str(error)))


def failed_sync_is_retried(patch: pytest.MonkeyPatch) -> None:
    sync = faulty_filesystem._FaultyAppender.sync

    def stubborn(self: Any) -> None:
        try:
            sync(self)
        except OSError:
            sync(self)

    patch.setattr(faulty_filesystem._FaultyAppender, "sync", stubborn)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def replayed_twice(patch: pytest.MonkeyPatch) -> None:
    """Images do not say which records they include."""

    def forgetful(context: PackContext, plan: Plan) -> Generator[None, None, list[SavedState]]:
        kept = yield from true_kept(context, plan)
        return [each._replace(lsn=plan.lsn) for each in kept]

    true_kept = checkpoint._states_to_save
    patch.setattr(checkpoint, "_states_to_save", forgetful)


def producers_left_out_of_images(patch: pytest.MonkeyPatch) -> None:
    encode = manifest._encode_entry

    def poorer(kept: SavedState) -> manifest.ManifestEntry:
        if hasattr(kept.state, "producers"):
            kept = kept._replace(state=msgspec.structs.replace(kept.state, producers={}))
        return encode(kept)

    patch.setattr(manifest, "_encode_entry", poorer)


def closure_left_out_of_images(patch: pytest.MonkeyPatch) -> None:
    encode = manifest._encode_entry

    def poorer(kept: SavedState) -> manifest.ManifestEntry:
        if hasattr(kept.state, "closed"):
            kept = kept._replace(state=msgspec.structs.replace(kept.state, closed=False))
        return encode(kept)

    patch.setattr(manifest, "_encode_entry", poorer)


def deletions_forgotten_by_the_manifest(patch: pytest.MonkeyPatch) -> None:
    save = Manifest.save

    def keep_all(self: Manifest, commit: Commit, kept: list[SavedState]) -> Iterator[None]:
        return save(self, msgspec.structs.replace(commit, removed=()), kept)

    patch.setattr(Manifest, "save", keep_all)


def packs_not_synced(patch: pytest.MonkeyPatch) -> None:
    finish = PackWriter.finish

    def careless(self: PackWriter) -> Any:
        patch_file = self._file
        patch_file.sync = lambda: None  # type: ignore[method-assign]
        return finish(self)

    patch.setattr(PackWriter, "finish", careless)


def log_dropped_before_the_checkpoint_is_durable(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Maintenance, checkpoint: Checkpoint) -> Job:
        self._journal.trim(checkpoint.segment)
        return (yield from self._cold.save(checkpoint))

    patch.setattr(Maintenance, "_save_and_trim", hasty)


def manifest_not_synced(patch: pytest.MonkeyPatch) -> None:
    sync = faulty_filesystem._FaultyAppender.sync

    def skip(self: Any) -> None:
        if "MANIFEST" not in str(self._path):
            sync(self)

    patch.setattr(faulty_filesystem._FaultyAppender, "sync", skip)


def manifest_trusted_before_it_is_synced(patch: pytest.MonkeyPatch) -> None:
    def trusting(self: Manifest) -> None:
        self._sections = manifest.Sections(self._filesystem.extend(self._path), *self._end)

    patch.setattr(Manifest, "repair", trusting)


def bytes_of_removed_streams_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    remove = JournaledStorage._remove

    def eager(self: JournaledStorage, stream_id: int, lsn: int) -> None:
        remove(self, stream_id, lsn)
        stored = self._unsaved.removed.pop(stream_id)
        packs_of(self).pack_set.remove_live(stored.extents)
        stored.extents = b""

    patch.setattr(JournaledStorage, "_remove", eager)


def deletions_saved_early(patch: pytest.MonkeyPatch) -> None:
    """A stream deleted during a checkpoint is saved as deleted, so that replay removes other streams too early."""

    class Nothing(set[int]):
        def add(self, element: int) -> None:
            pass

    init = UnsavedState.__init__

    def broken(self: UnsavedState) -> None:
        init(self)
        self.deleted = Nothing()

    patch.setattr(UnsavedState, "__init__", broken)


# -- packs -------------------------------------------------------------------------------------------------------------


def neighbours_joined_across_a_gap(patch: pytest.MonkeyPatch) -> None:
    neighbours = compaction._adjacent_groups

    def greedy(blob: bytes, sources: dict[int, Any]) -> Iterator[list[Extent]]:
        together = [extent for group in neighbours(blob, sources) for extent in group]
        if together:
            yield together

    patch.setattr(compaction, "_adjacent_groups", greedy)


def old_packs_unlinked_too_early(patch: pytest.MonkeyPatch) -> None:
    rewrite_packs = compaction.rewrite_packs

    def hasty(context: PackContext, rewrite: Any) -> Generator[None, None, Any]:
        result = yield from rewrite_packs(context, rewrite)
        for info in rewrite.sources:
            context.filesystem.unlink(compaction_path(context, info.number))
        yield
        return result

    def compaction_path(context: PackContext, number: int) -> Path:
        return context.pack_directory / f"{number:016d}.pack"

    patch.setattr(pack_store, "rewrite_packs", hasty)


def packs_counted_too_early(patch: pytest.MonkeyPatch) -> None:
    add = PackSet.add

    def open_at_once(self: PackSet, info: PackInfo) -> None:
        add(self, info)
        self._incomplete.clear()

    patch.setattr(PackSet, "add", open_at_once)


VARIANTS = {
    "segments that share a salt": Variant(segments_that_share_a_salt, crashes),
    "segment started while it is filled": Variant(segment_started_while_it_is_filled, crashes),
    "no sync of the log": Variant(no_sync_of_the_log, crashes),
    "acknowledged before written": Variant(acknowledged_before_written, crashes),
    "batches that can be split": Variant(batches_that_can_be_split, crashes),
    "checksums ignored": Variant(checksums_ignored, torn_writes_to_a_quiet_stream),
    "torn tail left in place": Variant(torn_tail_left_in_place, crashes),
    "no sync at boot": Variant(no_sync_at_boot, more_crashes),
    "synced in place at boot": Variant(synced_in_place_at_boot, failed_syncs),
    "segments re-created at boot": Variant(segments_re_created_at_boot, crashes),
    "no sync of directories": Variant(no_sync_of_directories, crashes),
    "writes continue after a failure": Variant(writes_continue_after_a_failure, failing_calls),
    "failed sync is retried": Variant(failed_sync_is_retried, failing_calls),
    "replayed twice": Variant(replayed_twice, crashes),
    "producers left out of images": Variant(producers_left_out_of_images, crashes),
    "closure left out of images": Variant(closure_left_out_of_images, crashes),
    "deletions forgotten by the manifest": Variant(deletions_forgotten_by_the_manifest, crashes),
    "packs not synced": Variant(packs_not_synced, crashes),
    "log dropped before the checkpoint is durable": Variant(log_dropped_before_the_checkpoint_is_durable, crashes),
    "manifest not synced": Variant(manifest_not_synced, crashes),
    "manifest trusted before it is synced": Variant(manifest_trusted_before_it_is_synced, crashes),
    "bytes of removed streams freed at once": Variant(bytes_of_removed_streams_freed_at_once, crashes),
    "deletions saved early": Variant(deletions_saved_early, directed),
    "neighbours joined across a gap": Variant(neighbours_joined_across_a_gap, crashes),
    "old packs unlinked too early": Variant(old_packs_unlinked_too_early, crashes),
    "packs counted too early": Variant(packs_counted_too_early, packs_being_checked),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_broken_store_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = VARIANTS[name]
    variant.broken(monkeypatch)
    try:
        variant.caught_by()
    except Exception:
        return
    pytest.fail(f"a store with {name!r} passes: the checkers do not detect it")


def test_intact_store_passes_the_same_checks(long: bool) -> None:
    run_seeds(range(2000, 2010 if long else 2004), generations=4)
    for number in range(1, clean_calls() + 1, 17 if long else 41):
        fail_call(number, 5)
