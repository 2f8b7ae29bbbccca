"""Offline tools for pack stores: check, read, count, copy and bulk-load a directory of the file modes.

A check reads everything: every frame of the journal, every section and entry of the manifest, every page, index and
directory of every pack, and compares each with its checksum and with the others. It does not change anything, and
continues after a problem, so one report contains all damage.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from headwater.core.records import Document, Image
from headwater.storage.arrival_times import StoredTimes, TimeTable
from headwater.storage.cold_store import UnsavedState
from headwater.storage.directory import open_directory
from headwater.storage.extents import split
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.journal.replay import Replay, copy_journal
from headwater.storage.journal.segments import JOURNAL_NAME, create_journal, segment_numbers, segment_path
from headwater.storage.journal_location import journal_directory
from headwater.storage.journaled_store import StoreSettings
from headwater.storage.offline.interface import CopyFile, StoredRun
from headwater.storage.packs.manifest import NAME, Commit, Manifest, SavedState
from headwater.storage.packs.pack import (
    PAGE_BYTES,
    DamagedPageError,
    Located,
    Pack,
    PackInfo,
    PackWriter,
    pack_numbers,
    pack_path,
)
from headwater.storage.packs.pack_set import BIG
from headwater.storage.packs.pack_store import FAMILY, PackStore
from headwater.storage.packs.recovery import PACKS_NAME, Recovery


class Finding(NamedTuple):
    """Damage that a check found."""

    path: Path
    stream: str | None
    """The stream that is affected, if it is known."""
    byte_position: int | None
    """The first position of the stream that may be affected."""
    what: str

    def __str__(self) -> str:
        if self.stream is None:
            return self.what
        return f"{self.stream} is damaged from position {self.byte_position}: {self.what}"


class PackTools:
    """The tools for the family of `file-fast` and `file-durable`."""

    def problems(self, filesystem: Filesystem, directory: Path) -> Iterator[str]:
        return map(str, find_damage(filesystem, directory))

    def open(self, filesystem: Filesystem, directory: Path) -> PackStore:
        return PackStore(filesystem, directory, StoreSettings())

    def parts(self, filesystem: Filesystem, directory: Path) -> dict[str, int]:
        store = self.open(filesystem, directory)
        unsaved = UnsavedState()
        for _ in store.recover(unsaved):
            pass
        found = store.parts()
        live = sum(extent.length for stored in unsaved.streams.values() for extent in split(stored.extents))
        found |= {"live_bytes": live, "dead_bytes": found["live_bytes"] + found["dead_bytes"] - live}
        store.close()
        return {**self.live_parts(filesystem, directory), **found}

    def live_parts(self, filesystem: Filesystem, directory: Path) -> dict[str, int]:
        log, packs = journal_directory(filesystem, directory), directory / PACKS_NAME
        segments = [segment_path(log, number) for number in _numbers(filesystem, log, segment_numbers)]
        files = [pack_path(packs, number) for number in _numbers(filesystem, packs, pack_numbers)]
        return {
            "segments": len(segments),
            "log_bytes": _sizes(filesystem, segments),
            "packs": len(files),
            "pack_bytes": _sizes(filesystem, files),
        }

    def copy(self, filesystem: Filesystem, source: Path, target: Path, copy_file: CopyFile) -> None:
        """Copy the manifest, then the packs that it lists, then the journal from the segment that it refers to.

        A running server keeps its files during the copy (`deferred_unlink`). So the journal is at least as new as the
        manifest, and together they are the store as of the last complete batch of that journal.
        """
        for name in (JOURNAL_NAME, PACKS_NAME):
            filesystem.make_directory(target / name)
        if not filesystem.exists(source / NAME):
            # No server has opened the store yet, so there is nothing else to copy.
            return
        copy_file(source / NAME, target / NAME)
        manifest = Manifest(filesystem, target)
        for _ in manifest.load():
            pass
        for number in manifest.packs:
            copy_file(pack_path(source / PACKS_NAME, number), pack_path(target / PACKS_NAME, number))
        journal = journal_directory(filesystem, source)
        copy_journal(filesystem, journal, target / JOURNAL_NAME, manifest.segment, copy_file)

    def bulk_load(
        self,
        filesystem: Filesystem,
        directory: Path,
        *,
        shard_count: int,
        map_bytes: int,
    ) -> PackBulkLoad:
        return PackBulkLoad(filesystem, directory)


def find_damage(filesystem: Filesystem, path: Path) -> Iterator[Finding]:
    """Yield all damage in a directory."""
    journal = journal_directory(filesystem, path)
    if not filesystem.exists(path / NAME):
        try:
            # Either it was never used, or its manifest was lost.
            _run(Recovery(filesystem, path, Manifest(filesystem, path)))
        except CorruptError as error:
            yield Finding(path / NAME, None, None, str(error))
        return
    manifest = Manifest(filesystem, path)
    names: dict[int, str] = {}
    try:
        for saved in manifest.load():
            if isinstance(saved.state, Image):
                names[saved.state.id] = saved.state.name
    except (CorruptError, OSError) as error:
        # Without it, the valid packs and the start of the journal are unknown.
        yield Finding(path / NAME, None, None, str(error))
        return

    def name_of(stream_id: int) -> str | None:
        name = names.get(stream_id)
        return f"stream {name!r} ({stream_id:016x})" if name is not None else None

    packs_are_readable = True
    for info in manifest.packs.values():
        for finding in _pack_findings(filesystem, path / PACKS_NAME, info, name_of):
            packs_are_readable = packs_are_readable and finding.stream is not None
            yield finding
    try:
        if packs_are_readable:
            # Read the manifest and the packs' directories again, and compare them with each other and the journal.
            _run(Recovery(filesystem, path, Manifest(filesystem, path)))
        else:
            for _ in Replay(filesystem, journal, manifest.segment, name_of).batches():
                pass
    except (StorageError, OSError) as error:
        yield Finding(journal, None, None, str(error))


def _run(recovery: Recovery) -> None:
    for _ in recovery.records():
        pass


def _pack_findings(
    filesystem: Filesystem, directory: Path, info: PackInfo, name_of: Callable[[int], str | None]
) -> Iterator[Finding]:
    path = pack_path(directory, info.number)
    try:
        pack = Pack(filesystem, directory, info)
    except (CorruptError, OSError) as error:
        yield Finding(path, None, None, str(error))
        return
    try:
        found = list(pack.extents())
        damage = list(pack.check_all())
        for each in damage:
            yield from _affected(path, each, found, name_of)
        if not damage:
            yield from _index_findings(path, pack, found, name_of)
    except (CorruptError, OSError) as error:
        yield Finding(path, None, None, str(error))
    finally:
        pack.close()


def _affected(
    path: Path, damage: DamagedPageError, found: list[Located], name_of: Callable[[int], str | None]
) -> Iterator[Finding]:
    """The streams that have bytes or index in a damaged page."""
    is_unused = True
    starts = [extent.offset for _, extent in found] + [damage.offset + PAGE_BYTES]
    for (stream_id, extent), index_end in zip(found, starts[1:], strict=True):
        if extent.offset < damage.offset + PAGE_BYTES and damage.offset < index_end and name_of(stream_id) is not None:
            is_unused = False
            byte_position = extent.byte_position + min(max(damage.offset - extent.offset, 0), extent.length)
            yield Finding(path, name_of(stream_id), byte_position, str(damage))
    if is_unused:
        yield Finding(path, None, None, f"{damage} (no existing stream has bytes there)")


def _index_findings(
    path: Path, pack: Pack, found: list[Located], name_of: Callable[[int], str | None]
) -> Iterator[Finding]:
    for stream_id, extent in found:
        ends = pack.ends(extent)[:].tolist()
        is_in_order = ends[-1] == extent.length and all(earlier < later for earlier, later in pairwise([0, *ends]))
        times = StoredTimes(*(column[:] for column in pack.times(extent)))
        if not is_in_order or not times.is_valid(extent.messages):
            name = name_of(stream_id) or f"stream {stream_id:016x}"
            yield Finding(path, name, extent.byte_position, f"{path}: the index at byte {extent.offset} is invalid")


def _numbers(filesystem: Filesystem, directory: Path, numbers: Callable[[Filesystem, Path], list[int]]) -> list[int]:
    return numbers(filesystem, directory) if filesystem.exists(directory) else []


def _sizes(filesystem: Filesystem, paths: list[Path]) -> int:
    total = 0
    for path in paths:
        try:
            total += filesystem.size(path)
        except FileNotFoundError:
            # A running server may have removed it just now.
            continue
    return total


PACK_BYTES: Final = 512 * 2**20
"""A pack is finished at this size, because a later rewrite processes a whole pack."""


class PackBulkLoad:
    """Fills a new store. Streams are added in order of their ids, and the runs of each in order; then `finish`."""

    def __init__(self, filesystem: Filesystem, directory: Path) -> None:
        self._filesystem = filesystem
        self._path = directory
        self._directory = open_directory(filesystem, directory, FAMILY)
        filesystem.make_directory(directory / PACKS_NAME)
        self._kept: list[SavedState] = []
        self._infos: list[PackInfo] = []
        self._writer: PackWriter | None = None

    def add_stream(self, image: Image, runs: Iterable[StoredRun]) -> None:
        for run in runs:
            ends = array("I")
            end = 0
            for length in run.lengths:
                end += length
                ends.append(end)
            self._pack().add(image.id, run.message_index, run.byte_position, run.pieces, ends, TimeTable(run.times))
        self._kept.append(SavedState(image.id, 0, image))

    def add_document(self, document: Document) -> None:
        self._kept.append(SavedState(document.key, 0, document))

    def finish(self) -> None:
        self._finish_pack()
        self._filesystem.sync_directory(self._path / PACKS_NAME)
        create_journal(self._filesystem, self._path / JOURNAL_NAME)
        manifest = Manifest(self._filesystem, self._path)
        for _ in manifest.save(Commit(True, 0, 1, tuple(self._infos)), self._kept):
            pass
        manifest.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
        self._directory.close()

    def _pack(self) -> PackWriter:
        if self._writer is not None and self._writer.data_bytes >= PACK_BYTES:
            self._finish_pack()
        if self._writer is None:
            number = len(self._infos) + 1
            # As large extents: a bulk load needs no merging.
            self._writer = PackWriter(self._filesystem, self._path / PACKS_NAME, number, BIG, number)
        return self._writer

    def _finish_pack(self) -> None:
        if self._writer is not None:
            self._infos.append(self._writer.finish())
            self._writer = None
