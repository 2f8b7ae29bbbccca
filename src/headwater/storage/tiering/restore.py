"""Restore a data directory from the object store, with or without a replica of the journal.

Without a replica, data that was not uploaded yet is lost. The new journal is marked as following a loss, so that
recovery does not look for records that only the lost journal had. With a replica nothing is lost: its batches become
the journal. The manifest is written last: a store exists when it has one.
"""

from __future__ import annotations

import logging
from pathlib import Path

from headwater.storage.directory import replace_file, write_file
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import CorruptError
from headwater.storage.journal.frames import read_frame
from headwater.storage.journal.replica import JournalSource
from headwater.storage.journal.segments import FileJournal, segment_numbers, segment_path
from headwater.storage.journal_location import journal_directory
from headwater.storage.packs.manifest import NAME, NEW_NAME, Manifest
from headwater.storage.packs.recovery import PACKS_NAME
from headwater.storage.tiering.claimed_prefix import StoreHead
from headwater.storage.tiering.objects import Objects

log = logging.getLogger("headwater.storage")


def restore_directory(filesystem: Filesystem, directory: Path, objects: Objects, head: StoreHead) -> None:
    """Restore a directory without a manifest from the manifest of `head`. Packs stay in the object store."""
    data = _stored_manifest(objects, head)
    journal = _make_directories(filesystem, directory)
    fresh = directory / NEW_NAME
    if filesystem.exists(fresh):
        filesystem.unlink(fresh)
    write_file(filesystem, fresh, data)
    manifest = Manifest(filesystem, directory, name=NEW_NAME)
    last_lsn = max((saved.lsn for saved in manifest.load()), default=0)
    last_lsn = max(last_lsn, manifest.lsn)
    for number in segment_numbers(filesystem, journal):
        filesystem.unlink(segment_path(journal, number))
    FileJournal(
        filesystem,
        journal,
        number=manifest.segment,
        last_lsn=last_lsn,
        previous_lsn=last_lsn,
        segment_bytes=1,
        durable=True,
        follows_a_loss=True,
    ).close()
    filesystem.replace(fresh, directory / NAME)
    filesystem.sync_directory(directory)
    log.warning("%s was restored from %s up to record %d; later records are lost", directory, objects.url, last_lsn)


def restore_replicated(
    filesystem: Filesystem,
    directory: Path,
    objects: Objects,
    head: StoreHead,
    replica: JournalSource,
    segment_bytes: int,
) -> None:
    """Restore an empty directory from the manifest of `head`, and from the later batches of the replica."""
    journal = _make_directories(filesystem, directory)
    manifest = Manifest(filesystem, directory, name=NEW_NAME)
    if head.parts:
        write_file(filesystem, directory / NEW_NAME, _stored_manifest(objects, head))
        for _ in manifest.load():
            pass
        _write_journal(filesystem, journal, manifest, replica, segment_bytes)
        filesystem.replace(directory / NEW_NAME, directory / NAME)
    else:
        _write_journal(filesystem, journal, manifest, replica, segment_bytes)
        first = Manifest(filesystem, directory)
        first.create()
        first.close()
    filesystem.sync_directory(directory)


def _write_journal(
    filesystem: Filesystem, journal: Path, manifest: Manifest, replica: JournalSource, segment_bytes: int
) -> None:
    copy = JournalCopy(filesystem, journal, manifest, segment_bytes)
    for batch in replica.batches(manifest.lsn):
        copy.add(batch)
    if copy.lsn != replica.last_lsn:
        raise CorruptError(
            f"The replicated journal ends at record {copy.lsn}, and its writer wrote {replica.last_lsn}."
        )
    copy.close()


class JournalCopy:
    """A new local journal after a manifest, written from the batches of a replica."""

    def __init__(self, filesystem: Filesystem, journal: Path, manifest: Manifest, segment_bytes: int) -> None:
        self._filesystem = filesystem
        self._journal = journal
        self._segment_bytes = segment_bytes
        self._number = manifest.segment
        self._writer: FileJournal | None = None
        self.lsn = manifest.lsn
        """The last record of the last batch."""

    def add(self, batch: bytearray) -> None:
        """Write the next batch. Raises `CorruptError` if it is damaged, or if another one is missing before it."""
        frame = read_frame(memoryview(batch), 0, int.from_bytes(batch[:8], "little"))
        if frame is None or frame.end != len(batch):
            raise CorruptError(f"The batch after record {self.lsn} in the replicated journal is damaged.")
        if self._writer is None:
            # The first batch may begin before the end of the manifest.
            self.lsn = min(self.lsn, frame.number - 1)
        if frame.number != self.lsn + 1:
            raise CorruptError(f"The replicated journal continues with record {frame.number} after {self.lsn}.")
        entries = frame.entries
        del frame
        if self._writer is not None and self._writer.size_bytes >= self._segment_bytes:
            self._writer.close()
            self._number += 1
            self._writer = self._begin_segment()
        writer = self._writer = self._writer or self._begin_segment()
        writer.adopt(batch, entries)
        self.lsn += entries

    def close(self) -> None:
        (self._writer or self._begin_segment()).close()

    def _begin_segment(self) -> FileJournal:
        return FileJournal(
            self._filesystem,
            self._journal,
            number=self._number,
            last_lsn=self.lsn,
            previous_lsn=self.lsn,
            segment_bytes=1,
            durable=False,
        )


def restore_manifest(filesystem: Filesystem, directory: Path, objects: Objects, head: StoreHead) -> None:
    """Replace the manifest of a directory, which may be empty, by that of `head`, and remove the journal."""
    journal = _make_directories(filesystem, directory)
    for number in segment_numbers(filesystem, journal):
        filesystem.unlink(segment_path(journal, number))
    if head.parts:
        replace_file(filesystem, directory / NAME, _stored_manifest(objects, head))
    else:
        first = Manifest(filesystem, directory)
        first.create()
        first.close()


def _stored_manifest(objects: Objects, head: StoreHead) -> bytes:
    data = bytearray()
    for part in head.parts:
        found = objects.get(part.key)
        if found is None or len(found.data) != part.size:
            raise CorruptError(f"{objects.url}/{part.key} is missing or has the wrong size.")
        data += found.data
    return bytes(data)


def _make_directories(filesystem: Filesystem, directory: Path) -> Path:
    """Create the directories of a store; returns that of the journal."""
    journal = journal_directory(filesystem, directory)
    for each in (journal, directory / PACKS_NAME):
        filesystem.make_directory(each)
    filesystem.sync_directory(directory)
    return journal
