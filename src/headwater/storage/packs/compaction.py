"""Rewrite packs: copy the live extents of some packs to new ones, and merge adjacent extents of a stream.

The old packs stay readable until every stream has its new extents, and their files stay until after that. A crash at
any point leaves either the old packs in the manifest, or the new ones.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Generator, Iterator
from typing import Final, NamedTuple

from headwater.storage import extents
from headwater.storage.arrival_times import TimeTable, read_table, unknown_times
from headwater.storage.columns import shifted
from headwater.storage.extents import Extent
from headwater.storage.interface import CorruptError
from headwater.storage.packs.checkpoint import PackContext, PackPair
from headwater.storage.packs.manifest import Commit
from headwater.storage.packs.pack import Pack, PackInfo, ends_offset
from headwater.storage.packs.pack_set import BIG, Rewrite

MERGED_MAX_BYTES: Final = 64 * 1024 * 1024
_STEP_BYTES: Final = 1024 * 1024


class Move(NamedTuple):
    """A new copy of a part of a stream: the bytes that `merged` covers."""

    stream_id: int
    merged: Extent


class DamagedPackError(CorruptError):
    """A pack cannot be rewritten, because it is damaged."""

    def __init__(self, number: int, damage: CorruptError) -> None:
        super().__init__(str(damage))
        self.number = number


class Rewritten(NamedTuple):
    moves: list[Move]
    added: tuple[PackInfo, ...]
    dropped: tuple[int, ...]


def rewrite_packs(context: PackContext, rewrite: Rewrite) -> Generator[None, None, Rewritten]:
    """The job of a rewrite; returns the moved extents, the new packs and the packs that they replace."""
    sources: dict[int, Pack] = {}
    small_tier = 0 if rewrite.tier == BIG else rewrite.tier
    fresh = PackPair(context, small_tier, min(info.born for info in rewrite.sources))
    moves: list[Move] = []
    written = 0
    try:
        for info in rewrite.sources:
            try:
                sources[info.number] = pack = Pack(context.filesystem, context.pack_directory, info)
                # Check before copying: a copy of damaged data would get a valid checksum.
                yield from pack.check_everything()
            except CorruptError as damage:
                raise DamagedPackError(info.number, damage) from damage
        for stream_id in _streams_in(sources):
            for group in _adjacent_groups(context.extents_of(stream_id), sources):
                moves.append(Move(stream_id, _merge(fresh, sources, stream_id, group)))
                written += moves[-1].merged.length + 16_384
                if written >= _STEP_BYTES:
                    written = 0
                    # Otherwise all copied pages would count as memory of this process until the end.
                    for pack in sources.values():
                        pack.relax()
                    yield
        added = fresh.finish()
    except BaseException:
        fresh.abandon()
        raise
    finally:
        for pack in sources.values():
            pack.close()
    dropped = tuple(info.number for info in rewrite.sources)
    _replace(context, added, dropped)
    return Rewritten(moves, added, dropped)


def forget_packs(context: PackContext, numbers: tuple[int, ...]) -> Generator[None, None, Rewritten]:
    """The job that removes packs without live data from the manifest. It does not open them."""
    _replace(context, (), numbers)
    yield
    return Rewritten([], (), numbers)


def _replace(context: PackContext, added: tuple[PackInfo, ...], dropped: tuple[int, ...]) -> None:
    manifest = context.manifest
    for _ in manifest.save(Commit(True, manifest.lsn, manifest.segment, added, dropped), []):
        # In one step: otherwise this commit would overwrite the journal position of a checkpoint in between.
        pass


def _streams_in(sources: dict[int, Pack]) -> Iterator[int]:
    """The streams that have extents in these packs, each once, in order."""
    previous = -1
    for stream_id, *_ in heapq.merge(*(pack.directory() for pack in sources.values())):
        if stream_id != previous:
            previous = stream_id
            yield stream_id


def _adjacent_groups(blob: bytes, sources: dict[int, Pack]) -> Iterator[list[Extent]]:
    """A stream's extents in the sources, grouped by adjacency."""
    group: list[Extent] = []
    size = 0
    for extent in extents.split(blob):
        if group and (extent.pack not in sources or size + extent.length > MERGED_MAX_BYTES):
            yield group
            group, size = [], 0
        if extent.pack in sources:
            group.append(extent)
            size += extent.length
    if group:
        yield group


def _merge(fresh: PackPair, sources: dict[int, Pack], stream_id: int, group: list[Extent]) -> Extent:
    first = group[0]
    ends = array("I")
    times = TimeTable()
    pieces = []
    for extent in group:
        pack = sources[extent.pack]
        view = pack.checked_view
        pieces.append(view[extent.offset : extent.offset + extent.length])
        index_at = ends_offset(extent)
        times_at = index_at + 4 * extent.messages
        extent_ends = view[index_at:times_at]
        shift = extent.byte_position - first.byte_position
        if shift:
            ends.extend(shifted(extent_ends.cast("I"), shift))
        else:
            ends.frombytes(extent_ends)
        times.join(read_table(view, times_at) if pack.has_times else unknown_times(extent.messages))
    return fresh.writer(ends[-1]).add(stream_id, first.first_index, first.byte_position, pieces, ends, times)
