"""Fill a new pack store from another store: packs and a manifest, as if one checkpoint had made them.

Invariant: the manifest comes last and is renamed into place, so an unfinished store has none, and is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from headwater.core.records import Document, Image
from headwater.storage.directory import open_directory
from headwater.storage.filesystem import Filesystem
from headwater.storage.journal.segments import JOURNAL_NAME, create_journal
from headwater.storage.offline.interface import MessageRun
from headwater.storage.packs.manifest import Commit, Kept, Manifest
from headwater.storage.packs.pack import PackInfo, PackWriter
from headwater.storage.packs.pack_set import BIG
from headwater.storage.packs.pack_store import FAMILY
from headwater.storage.packs.recovery import PACKS_NAME

PACK_BYTES: Final = 512 * 2**20
"""A pack is finished once it holds this much: a later rewrite takes a whole pack at a time."""


class PackBulkLoad:
    """Streams are added in order of their ids, and the runs of each in order; then `finish`."""

    def __init__(self, filesystem: Filesystem, directory: Path) -> None:
        self._filesystem = filesystem
        self._path = directory
        self._directory = open_directory(filesystem, directory, FAMILY)
        filesystem.make_directory(directory / PACKS_NAME)
        self._kept: list[Kept] = []
        self._infos: list[PackInfo] = []
        self._writer: PackWriter | None = None

    def add_stream(self, image: Image, runs: Iterable[MessageRun]) -> None:
        for run in runs:
            ends = array("I")
            end = 0
            for length in run.lengths:
                end += length
                ends.append(end)
            self._pack().add(image.id, run.index, run.position, run.pieces, ends)
        self._kept.append(Kept(image.id, 0, image))

    def add_document(self, document: Document) -> None:
        self._kept.append(Kept(document.key, 0, document))

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
            # As large extents: what is written at once needs no merging.
            self._writer = PackWriter(self._filesystem, self._path / PACKS_NAME, number, BIG, number)
        return self._writer

    def _finish_pack(self) -> None:
        if self._writer is not None:
            self._infos.append(self._writer.finish())
            self._writer = None
