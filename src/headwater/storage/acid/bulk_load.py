"""Fill a new `acid` store from another store: straight into its shards, with an empty journal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from headwater.core.records import Append, Document, Image, Record
from headwater.storage.acid.environment import map_bytes_each
from headwater.storage.acid.layout import DIRECTORY, check_shard_count, read_manifest, shard_of, shard_path
from headwater.storage.acid.shard import Shard, ShardChange, make_store
from headwater.storage.directory import open_directory
from headwater.storage.filesystem import Filesystem
from headwater.storage.journal.segments import JOURNAL_NAME, create_journal
from headwater.storage.offline.interface import MessageRun

BATCH_BYTES: Final = 4 * 2**20
"""Gathered for a shard before it gets a transaction."""

_RECORD_BYTES: Final = 256


class ShardBulkLoad:
    """For each stream: its state without bytes, its bytes, then its whole state."""

    def __init__(self, filesystem: Filesystem, directory: Path, shard_count: int, map_bytes: int) -> None:
        check_shard_count(shard_count)
        self._directory = open_directory(filesystem, directory, "acid")
        self._shards: list[Shard] = []
        self._changes: list[list[ShardChange]] = [[] for _ in range(shard_count)]
        self._sizes = [0] * shard_count
        root = directory / DIRECTORY
        make_store(filesystem, root, shard_count, create_journal(filesystem, directory / JOURNAL_NAME))
        store_id = read_manifest(root).id_bytes
        size = map_bytes_each(map_bytes, shard_count)
        for number in range(shard_count):
            self._shards.append(Shard(shard_path(root, number), number, shard_count, size, store_id))

    def add_stream(self, image: Image, runs: Iterable[MessageRun]) -> None:
        shard = shard_of(image.name, len(self._shards))
        is_new = True
        for run in runs:
            if is_new:
                self._put(shard, _without_bytes(image, run.index, run.position), 0)
                is_new = False
            payload = b"".join(run.pieces)
            append = Append(image.id, image.written_ms, run.index, run.position, payload, tuple(run.lengths))
            self._put(shard, append, len(payload))
        self._put(shard, image, 0)

    def add_document(self, document: Document) -> None:
        self._put(shard_of(document.key, len(self._shards)), document, len(document.value or b""))

    def finish(self) -> None:
        for number in range(len(self._shards)):
            self._apply(number)

    def close(self) -> None:
        for shard in self._shards:
            shard.close()
        self._shards = []
        self._directory.close()

    def _put(self, shard: int, record: Record, size: int) -> None:
        self._changes[shard].append(ShardChange(record, ()))
        self._sizes[shard] += size + _RECORD_BYTES
        if self._sizes[shard] >= BATCH_BYTES:
            self._apply(shard)

    def _apply(self, number: int) -> None:
        if self._changes[number]:
            self._shards[number].apply(0, self._changes[number])
        self._changes[number] = []
        self._sizes[number] = 0


def _without_bytes(image: Image, index: int, position: int) -> Image:
    """A stream before any of its bytes are stored."""
    return msgspec.structs.replace(
        image,
        message_index=index,
        byte_position=position,
        closed=False,
        closed_by=None,
        producers={},
        ages=None,
        deleted=False,
    )
