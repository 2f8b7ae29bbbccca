"""Check an `acid` store that no server has open.

First every page of every database is verified by a reader that never maps the file (damaged pages can crash a process
that maps them). Then it verifies every checksum, and that all parts agree: the ledgers with the checkpoint file and the
journal, the state of each stream with its pieces, producers with streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from lmdb.verify import VerifyError
from lmdb.verify import verify as verify_pages

from headwater.core.records import Image
from headwater.storage.acid.layout import (
    DIRECTORY,
    FIRST_FORMAT,
    AcidManifest,
    old_journal_path,
    read_manifest,
    read_mark,
    shard_path,
)
from headwater.storage.acid.old_journal import OldJournal
from headwater.storage.acid.pieces import KEY, DamagedPieceError, decode_piece
from headwater.storage.acid.rows import ID
from headwater.storage.acid.shard import Shard
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import StorageError
from headwater.storage.journal.replay import Replay
from headwater.storage.journal_location import journal_directory

_MAP_BYTES: Final = 2**40
"""Address space for one database at a time: enough for one that grows while it is read."""


def find_problems(filesystem: Filesystem, directory: Path) -> Iterator[str]:
    """Yield one sentence for each problem. Raises `StorageError` if the store cannot be opened."""
    root = directory / DIRECTORY
    if not root.exists():
        # No server has opened the store yet.
        return
    manifest = read_manifest(root)
    paths = [shard_path(root, number) for number in range(manifest.shard_count)]
    if manifest.format == FIRST_FORMAT:
        paths.append(old_journal_path(root))
    is_damaged = False
    for path in paths:
        for problem in _pages(path):
            is_damaged = True
            yield f"{path}: {problem}"
    if not is_damaged:
        yield from _contents(filesystem, directory, manifest)


def open_shard(root: Path, number: int, manifest: AcidManifest) -> Shard:
    """Open a shard for reading, whether or not a server has it open."""
    count, store_id = manifest.shard_count, manifest.id_bytes
    return Shard(shard_path(root, number), number, count, _MAP_BYTES, store_id, readonly=True)


def _pages(path: Path) -> Iterator[str]:
    try:
        yield from verify_pages(str(path))  # type: ignore[no-untyped-call]
    except (VerifyError, OSError) as error:
        yield str(error)


def _contents(filesystem: Filesystem, directory: Path, manifest: AcidManifest) -> Iterator[str]:
    root = directory / DIRECTORY
    try:
        seen, last_lsn, is_pending = _journal(filesystem, directory, manifest)
    except StorageError as error:
        yield str(error)
        return
    streams: dict[int, Image] = {}
    for number in range(manifest.shard_count):
        try:
            with closing(open_shard(root, number, manifest)) as shard:
                if not seen[number] <= shard.ledger.lsn <= last_lsn:
                    yield (
                        f"{shard.path} is at record {shard.ledger.lsn}, which does not fit the journal"
                        f" (seen at {seen[number]}, ends at {last_lsn}): files of different times were mixed."
                    )
                images = {state.id: state for state in shard.states() if isinstance(state, Image)}
                yield from _pieces(shard, images)
                yield from _producers_without_stream(shard, images)
                streams |= images
        except StorageError as error:
            yield str(error)
    if not is_pending:
        # While records are pending, one shard may be ahead of another.
        for image in streams.values():
            if image.fork is not None and image.fork.source_id not in streams:
                yield f"Stream {image.name!r} is a fork of {image.fork.source_name!r}, which does not exist."


def _journal(filesystem: Filesystem, directory: Path, manifest: AcidManifest) -> tuple[tuple[int, ...], int, bool]:
    """Read the whole journal: the least record of each shard, the last record, and whether any are pending."""
    root = directory / DIRECTORY
    if manifest.format == FIRST_FORMAT:
        with closing(OldJournal(old_journal_path(root), manifest.id_bytes, manifest.shard_count)) as journal:
            for _ in journal.entries():
                pass
            return journal.shard_seqs, journal.last_seq, journal.last_seq > journal.trimmed_seq
    mark = read_mark(root, manifest)
    replay = Replay(filesystem, journal_directory(filesystem, directory), mark.segment, lambda _: None)
    for _ in replay.batches():
        pass
    return mark.shard_lsns, replay.last_lsn, replay.last_lsn > mark.lsn


def _pieces(shard: Shard, streams: dict[int, Image]) -> Iterator[str]:
    """Check that the pieces of every stream are intact, and cover it from its beginning to its end."""
    reached: dict[int, tuple[int, int]] = {}
    graves = set(_graves(shard))
    with shard.environment.begin(buffers=True) as txn, txn.cursor(shard.databases.data) as cursor:
        for view, value in cursor:
            key = bytes(view)
            if len(key) != KEY.size:
                yield f"{shard.path}: a piece is stored under a key of the wrong size."
                continue
            stream_id, byte_position = KEY.unpack(key)
            image = streams.get(stream_id)
            if image is None:
                if stream_id not in graves:
                    yield (
                        f"{shard.path}: bytes at position {byte_position} belong to an unknown stream"
                        f" ({key[:8].hex()})."
                    )
                continue
            try:
                piece = decode_piece(key, value)
            except DamagedPieceError as error:
                yield f"Stream {image.name!r}, position {byte_position}: {error} ({shard.path})."
                continue
            if len(piece.ends) and not piece.times.is_valid(len(piece.ends)):
                yield (
                    f"Stream {image.name!r}, position {byte_position}: its arrival times are not in order"
                    f" ({shard.path})."
                )
            try:
                piece.verified_body()
            except DamagedPieceError as error:
                yield f"Stream {image.name!r}, position {byte_position}: {error} ({shard.path})."
            at = reached.get(stream_id)
            if at is None:
                # What is before the earliest retained offset may have been trimmed, piece by piece.
                is_contiguous = piece.byte_position <= max(_base(image)[1], image.retained_position)
            else:
                is_contiguous = (piece.start_index, piece.byte_position) == at
            if not is_contiguous:
                yield f"Stream {image.name!r}: bytes are missing before position {piece.byte_position} ({shard.path})."
            reached[stream_id] = (piece.end_index, piece.end_position)
    for stream_id, image in streams.items():
        kept_from = max(_base(image), (image.retained_index, image.retained_position))
        end_index, end_position = reached.get(stream_id, kept_from)
        if (end_index, end_position) != (image.message_index, image.byte_position):
            yield (
                f"Stream {image.name!r} ends at position {image.byte_position} after {image.message_index} messages,"
                f" but its bytes end at {end_position} after {end_index} ({shard.path})."
            )


def _producers_without_stream(shard: Shard, streams: dict[int, Image]) -> Iterator[str]:
    known = streams.keys() | set(_graves(shard))
    previous = -1
    with shard.environment.begin() as txn, txn.cursor(shard.databases.producers) as cursor:
        for key in cursor.iternext(values=False):
            (stream_id,) = ID.unpack_from(key)
            if stream_id not in known and stream_id != previous:
                yield f"{shard.path}: producers belong to an unknown stream ({key[:8].hex()})."
            previous = stream_id


def _graves(shard: Shard) -> list[int]:
    with shard.environment.begin() as txn, txn.cursor(shard.databases.graves) as cursor:
        return [ID.unpack(key)[0] for key in cursor.iternext(values=False)]


def _base(image: Image) -> tuple[int, int]:
    return (image.fork.message_index, image.fork.byte_position) if image.fork is not None else (0, 0)
