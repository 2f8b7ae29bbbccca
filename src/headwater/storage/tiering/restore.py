"""Begin a data directory from the object store alone: what was not stored there yet is lost.

The journal that begins says that it follows a loss, so that recovery does not look for what only the lost one had. The
manifest is written last: a store exists when it has one.
"""

from __future__ import annotations

import logging
from pathlib import Path

from headwater.storage.directory import write_file
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import CorruptError
from headwater.storage.journal.segments import FileJournal, segment_numbers, segment_path
from headwater.storage.journal_place import journal_directory
from headwater.storage.packs.manifest import NAME, NEW_NAME, Manifest
from headwater.storage.packs.recovery import PACKS_NAME
from headwater.storage.tiering.home import StoreHead
from headwater.storage.tiering.objects import Objects

log = logging.getLogger("headwater.storage")


def restore_directory(filesystem: Filesystem, directory: Path, objects: Objects, head: StoreHead) -> None:
    """Fill a directory without a manifest with what `head` leads to. Packs stay in the object store."""
    data = bytearray()
    for part in head.parts:
        found = objects.get(part.key)
        if found is None or len(found.data) != part.size:
            raise CorruptError(f"{objects.url}/{part.key} is missing or has the wrong size.")
        data += found.data
    journal = journal_directory(filesystem, directory)
    for each in (journal, directory / PACKS_NAME):
        filesystem.make_directory(each)
    filesystem.sync_directory(directory)
    fresh = directory / NEW_NAME
    if filesystem.exists(fresh):
        filesystem.unlink(fresh)
    write_file(filesystem, fresh, bytes(data))
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
    log.warning(
        "%s begins with what %s has up to record %d; what came after it is lost", directory, objects.url, last_lsn
    )
