"""Bits that flip at rest: each flipped byte gives the right data or a loud error, never wrong bytes.

And `check` finds what a server would stumble over, without one.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.offline.interface import open_reader
from headwater.storage.packs.offline import PackTools, find_damage
from tests.storage.faulty_filesystem import FaultyFilesystem
from tests.storage.model import model_of
from tests.storage.packs.test_checkpoints import Bench
from tests.storage.simulation import DATA, Life, Simulation

Dump = dict[str, Any]
Disk = dict[str, bytes]


@pytest.fixture(scope="module")
def store() -> tuple[Disk, Dump]:
    """A small store with all there can be: packs of two tiers, forks, a manifest with history, a log after it."""
    simulation = Simulation(31)
    life = Life(simulation.filesystem, simulation.random)
    for step in range(70):
        simulation.step(life)
        if step % 20 == 19:
            life.rest()
    life.commit()
    life.rest()
    for number in range(3):
        life.create(f"last-{number}", b"in the log only")
        life.commit()
    life.storage.close()
    disk = simulation.filesystem.snapshot()
    kinds = {name.rpartition(".")[2] for name in disk}
    assert {"log", "pack", "/data/MANIFEST", "/data/FORMAT"} <= kinds
    return disk, life.model.dump()


def outcome_of(filesystem: FaultyFilesystem, expected: Dump) -> str:
    """`right`, or the error that came instead. Anything else is a failure."""
    try:
        life = Life(filesystem, Random(1))
    except StorageError as error:
        return str(error)
    try:
        found = model_of(life.catalog, life.storage).dump()
    except CorruptError as error:
        return str(error)
    assert found == expected, "wrong data was served"
    return "right"


def places(disk: Disk, long: bool) -> list[tuple[str, int]]:
    everywhere = [(name, at) for name, data in sorted(disk.items()) if "LOCK" not in name for at in range(len(data))]
    return everywhere if long else Random(5).sample(everywhere, 1200)


def test_a_flipped_bit_is_right_or_loud(store: tuple[Disk, Dump], long: bool) -> None:
    disk, expected = store
    filesystem = FaultyFilesystem(Random(1))
    random = Random(2)
    loud = 0
    for name, at in places(disk, long):
        damaged = bytearray(disk[name])
        damaged[at] ^= 1 << random.randrange(8)
        filesystem.restore({**disk, name: bytes(damaged)})
        try:
            outcome = outcome_of(filesystem, expected)
        except AssertionError as error:
            raise AssertionError(f"byte {at} of {name}: {error}") from error
        if outcome != "right":
            loud += 1
            assert_it_helps(outcome, name)
    assert loud > 500, "so many right answers cannot be"


def assert_it_helps(error: str, name: str) -> None:
    """It names the file or, where a stream is harmed, that and its position."""
    if name.endswith(".pack"):
        assert name in error
        assert "stream '" in error or "trailer" in error or "checksums" in error or "directory" in error, error
        if "stream '" in error:
            assert "at position" in error
    elif name.endswith(".log"):
        assert name in error or "log" in error, error
    elif name.endswith("MANIFEST"):
        # A manifest that lost its last section misses what that had brought, or still wants what it had dropped.
        assert "MANIFEST" in error or "is missing" in error or "in no pack" in error or "no checkpoint" in error, error
    else:
        assert "FORMAT" in error or "format" in error or "written by storage mode" in error, error


def without_lock(disk: Disk) -> Disk:
    return {name: data for name, data in disk.items() if not name.endswith("LOCK")}


def test_check_finds_what_a_server_would_stumble_over(store: tuple[Disk, Dump], long: bool) -> None:
    disk, expected = store
    filesystem = FaultyFilesystem(Random(1))
    random = Random(3)
    sample = places(disk, long)
    for name, at in sample if long else sample[:400]:
        if "FORMAT" in name:
            continue
        damaged = bytearray(disk[name])
        damaged[at] ^= 1 << random.randrange(8)
        image = {**disk, name: bytes(damaged)}
        filesystem.restore(image)
        findings = list(find_damage(filesystem, DATA))
        assert without_lock(filesystem.snapshot()) == without_lock(image), "it changed something"
        if not findings:
            filesystem.crash(power=False)
            assert outcome_of(filesystem, expected) == "right", f"byte {at} of {name} escaped the check"


def test_a_sound_store_has_nothing_to_find(store: tuple[Disk, Dump]) -> None:
    disk, expected = store
    filesystem = FaultyFilesystem(Random(1))
    filesystem.restore(disk)
    assert list(find_damage(filesystem, DATA)) == []
    filesystem.crash(power=False)
    with open_reader(PackTools(), filesystem, DATA) as reader:
        assert len(reader.catalog) == len(expected["streams"])
        assert list(reader.gaps()) == []
    figures = PackTools().parts(filesystem, DATA)
    assert figures["packs"] == sum(name.endswith(".pack") for name in disk)
    assert figures["log_bytes"] == sum(len(data) for name, data in disk.items() if name.endswith(".log"))
    assert figures["live_bytes"] > 0
    filesystem.crash(power=False)
    assert outcome_of(filesystem, expected) == "right"


def test_check_names_every_harmed_stream() -> None:
    bench = Bench()
    for name in ("one", "two", "three"):
        bench.life.create(name, name.encode() * 4000)
    bench.life.commit()
    bench.save()
    bench.life.storage.close()
    disk = bench.filesystem.snapshot()
    pack = next(name for name in disk if name.endswith(".pack"))
    damaged = bytearray(disk[pack])
    damaged[0] ^= 1
    damaged[20_000] ^= 1
    bench.filesystem.restore({**disk, pack: bytes(damaged)})
    findings = list(find_damage(bench.filesystem, DATA))
    assert {finding.path.name for finding in findings} == {pack.rpartition("/")[2]}
    told = " ".join(map(str, findings))
    assert all(f"stream '{name}'" in told for name in ("one", "two", "three"))
    assert all(finding.position is not None for finding in findings)


def test_missing_files_are_missed(store: tuple[Disk, Dump]) -> None:
    disk, expected = store
    filesystem = FaultyFilesystem(Random(1))
    for name in disk:
        if name.endswith("LOCK"):
            continue
        filesystem.restore({other: data for other, data in disk.items() if other != name})
        outcome = outcome_of(filesystem, expected) if "log" not in name else ""
        if name.endswith(".log") and name != max(other for other in disk if other.endswith(".log")):
            outcome = outcome_of(filesystem, expected)
            assert "missing" in outcome, name
        elif name.endswith((".pack", "MANIFEST")):
            assert "missing" in outcome, name
        elif name.endswith("FORMAT"):
            assert "FORMAT" in outcome


def test_a_mark_of_rest_tells_damage_from_a_torn_write() -> None:
    """After a second of rest the last batch is known to be whole: a flipped bit in it is not taken for a torn tail."""
    bench = Bench()
    bench.life.create("a", b"the last thing written")
    bench.life.commit()
    log = "/data/log/0000000000000001.log"
    for rested in (False, True):
        if rested:
            bench.life.rest()
        disk = bench.filesystem.snapshot()
        damaged = bytearray(disk[log])
        damaged[damaged.index(b"last thing")] ^= 1
        other = FaultyFilesystem(Random(1))
        other.restore({**disk, log: bytes(damaged)})
        if rested:
            with pytest.raises(CorruptError, match="damaged at byte 64"):
                Life(other, Random(1))
        else:
            assert not Life(other, Random(1)).catalog.by_id
