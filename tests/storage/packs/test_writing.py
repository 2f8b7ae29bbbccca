"""Writing a pack: its bytes do not depend on the sizes of the pieces, and large pieces are not copied."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from headwater.operating_system import SYSTEM
from headwater.storage.arrival_times import TimeRun, TimeTable
from headwater.storage.filesystem import Bytes, RealFilesystem
from headwater.storage.packs import pack
from headwater.storage.packs.pack import PAGE_BYTES, Pack, PackWriter, pack_path

SIZES = (1, 7, PAGE_BYTES - 1, PAGE_BYTES, 5 * PAGE_BYTES + 3, pack._DIRECT_BYTES, pack._FLUSH_BYTES, 2_500_001)


def write(directory: Path, number: int, extents: Sequence[Sequence[bytes]]) -> bytes:
    writer = PackWriter(RealFilesystem(), directory, number, 0, number)
    for stream_id, pieces in enumerate(extents, 1):
        size = sum(map(len, pieces))
        writer.add(stream_id, 0, 0, map(memoryview, pieces), array("I", [size]), TimeTable(iter([TimeRun(1, 5)])))
    info = writer.finish()
    opened = Pack(RealFilesystem(), directory, info)
    opened.check(0, info.data_bytes)
    for located, pieces in zip(opened.extents(), extents, strict=True):
        at = located.extent.offset
        data = b"".join(pieces)
        assert opened.data(at, at + len(data)) == data
    return pack_path(directory, number).read_bytes()


@pytest.mark.parametrize("seed", range(4))
def test_pack_is_the_same_for_any_pieces(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    extents = [
        [chance.randbytes(chance.choice(SIZES)) for _ in range(chance.randint(1, 4))]
        for _ in range(chance.randint(1, 4))
    ]
    (tmp_path / "copied").mkdir()
    direct = write(tmp_path, 1, extents)
    monkeypatch.setattr(pack, "_DIRECT_BYTES", 2**40)
    assert write(tmp_path / "copied", 1, extents) == direct


def test_large_piece_is_written_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = bytes(1024 * 1024)
    uncopied = 0

    def watched(file: object, data: Bytes) -> None:
        nonlocal uncopied
        if isinstance(data, memoryview) and data.obj is large:
            uncopied += len(data)

    monkeypatch.setattr(pack, "write_whole", watched)
    writer = PackWriter(RealFilesystem(), tmp_path, 1, 0, 1)
    times = TimeTable(iter([TimeRun(1, 5)]))
    writer.add(1, 0, 0, [memoryview(large)], array("I", [len(large)]), times)
    assert uncopied >= len(large) - 2 * PAGE_BYTES
    writer.abandon()


def test_blocks_of_a_large_extent_are_reserved_where_its_data_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[tuple[int, int]] = []
    monkeypatch.setattr(SYSTEM, "allocate", lambda _, offset, length: reserved.append((offset, length)))
    writer = PackWriter(RealFilesystem(), tmp_path, 1, 0, 1)
    times = TimeTable(iter([TimeRun(1, 5)]))
    writer.add(1, 0, 0, [b"small"], array("I", [5]), times)
    extent = writer.add(2, 0, 0, [bytes(700_000)] * 3, array("I", [2_100_000]), times)
    writer.finish()
    assert reserved == [(extent.offset, extent.length)]
