"""Looking into an `acid` store from outside: is it whole, and what does it hold.

`check` is for a store that no server has open. It first has every page of every database verified by a reader of its
own that never hands a file to LMDB (damaged pages can crash a process that maps them), then verifies every checksum
and that all parts agree: ledgers with the journal, the state of each stream with its pieces, producers with streams.
`stats` may look at a store in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import lmdb
from lmdb.verify import VerifyError
from lmdb.verify import verify as verify_pages

from headwater.core.records import Image
from headwater.storage.acid.environment import reading, used_bytes
from headwater.storage.acid.journal import Journal
from headwater.storage.acid.layout import DIRECTORY, Manifest, journal_path, read_manifest, shard_path
from headwater.storage.acid.pieces import KEY, DamagedPieceError, decode_piece
from headwater.storage.acid.rows import ID
from headwater.storage.acid.shard import Shard
from headwater.storage.directory import open_directory
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError

_MAP_BYTES: Final = 2**40
"""Of address space, for one database at a time: enough for one that grows while it is looked at."""


class ShardStats(NamedTuple):
    path: Path
    streams: int
    documents: int
    pieces: int
    file_bytes: int
    used_bytes: int
    """What the file holds beyond this is free, and used again by later writes."""
    removed_streams: int
    """Streams whose bytes are still being taken away."""


class Stats(NamedTuple):
    streams: int
    documents: int
    payload_bytes: int
    """As far as the shards have come; what is still in the journal is not counted."""
    shards: list[ShardStats]
    journal_entries: int
    journal_bytes: int
    free_disk_bytes: int


def check(directory: Path) -> Iterator[str]:
    """Every problem found, a sentence each; none when all is well. Raises `StorageError` if it cannot even look."""
    with closing(open_directory(RealFilesystem(), directory, "acid", create=False)):
        root = directory / DIRECTORY
        manifest = read_manifest(root)
        paths = (shard_path(root, number) for number in range(manifest.shard_count))
        damaged = False
        for path in (*paths, journal_path(root)):
            for problem in _pages(path):
                damaged = True
                yield f"{path}: {problem}"
        if damaged:
            return
        yield from _contents(root, manifest)


def stats(directory: Path) -> Stats:
    """What a store holds and how much room it takes."""
    root = directory / DIRECTORY
    manifest = read_manifest(root)
    shards: list[ShardStats] = []
    payload_bytes = 0
    for number in range(manifest.shard_count):
        with closing(open_shard(root, number, manifest)) as shard:
            shards.append(_shard_stats(shard))
            for state in shard.states():
                if isinstance(state, Image):
                    payload_bytes += state.byte_position - _base(state)[1]
    with closing(open_journal(root, manifest)) as journal:
        entries = journal.last_seq - journal.mark.seq
    return Stats(
        sum(shard.streams for shard in shards),
        sum(shard.documents for shard in shards),
        payload_bytes,
        shards,
        entries,
        (journal_path(root) / "data.mdb").stat().st_size,
        RealFilesystem().free_bytes(root),
    )


def _pages(path: Path) -> Iterator[str]:
    try:
        yield from verify_pages(str(path))  # type: ignore[no-untyped-call]
    except (VerifyError, OSError) as error:
        yield str(error)


def _contents(root: Path, manifest: Manifest) -> Iterator[str]:
    streams: dict[int, Image] = {}
    with closing(open_journal(root, manifest)) as journal:
        seen = journal.mark.shard_seqs
        last_seq = journal.last_seq
        pending = last_seq > journal.mark.seq
        yield from _journal(journal)
    for number in range(manifest.shard_count):
        try:
            with closing(open_shard(root, number, manifest)) as shard:
                if not seen[number] <= shard.ledger.seq <= last_seq:
                    yield (
                        f"{shard.path} is at entry {shard.ledger.seq}, which does not fit the journal"
                        f" (seen at {seen[number]}, ends at {last_seq}): files of different times were mixed."
                    )
                here = {state.id: state for state in shard.states() if isinstance(state, Image)}
                yield from _pieces(shard, here)
                yield from _strangers(shard, here)
                streams |= here
        except StorageError as error:
            yield str(error)
    if not pending:
        # While entries wait, one shard may be ahead of another.
        for image in streams.values():
            if image.fork is not None and image.fork.source_id not in streams:
                yield f"Stream {image.name!r} is a fork of {image.fork.source_name!r}, which is gone."


def _journal(journal: Journal) -> Iterator[str]:
    try:
        for _ in journal.entries():
            pass
    except StorageError as error:
        yield str(error)


def _pieces(shard: Shard, streams: dict[int, Image]) -> Iterator[str]:
    """Whether the pieces of every stream are whole, and reach from its beginning to its end."""
    reached: dict[int, tuple[int, int]] = {}
    graves = set(_graves(shard))
    with shard.environment.begin(buffers=True) as txn, txn.cursor(shard.databases.data) as cursor:
        for view, value in cursor:
            key = bytes(view)
            if len(key) != KEY.size:
                yield f"{shard.path}: a piece is filed under a key of the wrong size."
                continue
            stream_id, position = KEY.unpack(key)
            image = streams.get(stream_id)
            if image is None:
                if stream_id not in graves:
                    yield f"{shard.path}: bytes at position {position} belong to no stream (id {key[:8].hex()})."
                continue
            try:
                piece = decode_piece(key, value)
            except DamagedPieceError as error:
                yield f"Stream {image.name!r}, position {position}: {error} ({shard.path})."
                continue
            try:
                piece.verified_body()
            except DamagedPieceError as error:
                yield f"Stream {image.name!r}, position {position}: {error} ({shard.path})."
            at = reached.get(stream_id)
            if at is None:
                # What lies before the earliest retained offset may have been trimmed, piece by piece.
                whole = piece.position <= max(_base(image)[1], image.retained_position)
            else:
                whole = (piece.start_index, piece.position) == at
            if not whole:
                yield f"Stream {image.name!r}: bytes are missing before position {piece.position} ({shard.path})."
            reached[stream_id] = (piece.end_index, piece.end_position)
    for stream_id, image in streams.items():
        kept_from = max(_base(image), (image.retained_index, image.retained_position))
        end_index, end_position = reached.get(stream_id, kept_from)
        if (end_index, end_position) != (image.message_index, image.byte_position):
            yield (
                f"Stream {image.name!r} ends at position {image.byte_position} after {image.message_index} messages,"
                f" but its bytes end at {end_position} after {end_index} ({shard.path})."
            )


def _strangers(shard: Shard, streams: dict[int, Image]) -> Iterator[str]:
    """Producers of streams that are not there."""
    known = streams.keys() | set(_graves(shard))
    previous = -1
    with shard.environment.begin() as txn, txn.cursor(shard.databases.producers) as cursor:
        for key in cursor.iternext(values=False):
            (stream_id,) = ID.unpack_from(key)
            if stream_id not in known and stream_id != previous:
                yield f"{shard.path}: producers belong to no stream (id {key[:8].hex()})."
            previous = stream_id


def _graves(shard: Shard) -> list[int]:
    with shard.environment.begin() as txn, txn.cursor(shard.databases.graves) as cursor:
        return [ID.unpack(key)[0] for key in cursor.iternext(values=False)]


def _shard_stats(shard: Shard) -> ShardStats:
    databases = shard.databases
    with reading(shard.path), shard.environment.begin() as txn:
        return ShardStats(
            shard.path,
            _entries(txn, databases.streams),
            _entries(txn, databases.documents),
            _entries(txn, databases.data),
            (shard.path / "data.mdb").stat().st_size,
            used_bytes(txn, databases),
            _entries(txn, databases.graves),
        )


def _entries(txn: lmdb.Transaction[bytes], database: lmdb._Database) -> int:
    return txn.stat(database)["entries"]


def _base(image: Image) -> tuple[int, int]:
    return (image.fork.message_index, image.fork.byte_position) if image.fork is not None else (0, 0)


def open_shard(root: Path, number: int, manifest: Manifest) -> Shard:
    count, store_id = manifest.shard_count, manifest.id_bytes
    return Shard(shard_path(root, number), number, count, _MAP_BYTES, store_id, readonly=True)


def open_journal(root: Path, manifest: Manifest) -> Journal:
    return Journal(journal_path(root), _MAP_BYTES, manifest.id_bytes, manifest.shard_count, readonly=True)
