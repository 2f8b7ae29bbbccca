"""Flipped bits in stored files: reads return the right data or an error, never wrong bytes.

`check` finds, without a server, the damage on which a server would fail.
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
from tests.storage.simulation import DATA, SimulatedProcess, Simulation

Dump = dict[str, Any]
Disk = dict[str, bytes]


@pytest.fixture(scope="module")
def store() -> tuple[Disk, Dump]:
    """Build a small store with packs of two tiers, forks, a manifest with several sections and a journal."""
    simulation = Simulation(31)
    process = SimulatedProcess(simulation.filesystem, simulation.random)
    for step in range(70):
        simulation.step(process)
        if step % 20 == 19:
            process.rest()
    process.commit()
    process.rest()
    for number in range(3):
        process.create(f"last-{number}", b"in the log only")
        process.commit()
    process.storage.close()
    disk = simulation.filesystem.snapshot()
    kinds = {name.rpartition(".")[2] for name in disk}
    assert {"log", "pack", "/data/MANIFEST", "/data/FORMAT"} <= kinds
    return disk, process.model.dump()


def outcome_of(filesystem: FaultyFilesystem, expected: Dump) -> str:
    """Return `right` or the error message; fail on wrong data."""
    try:
        process = SimulatedProcess(filesystem, Random(1))
    except StorageError as error:
        return str(error)
    try:
        found = model_of(process.catalog, process.storage).dump()
    except CorruptError as error:
        return str(error)
    assert found == expected, "wrong data was served"
    return "right"


def places(disk: Disk, long: bool) -> list[tuple[str, int]]:
    everywhere = [(name, at) for name, data in sorted(disk.items()) if "LOCK" not in name for at in range(len(data))]
    return everywhere if long else Random(5).sample(everywhere, 600)


def test_flipped_bit_is_corrected_or_reported(store: tuple[Disk, Dump], long: bool) -> None:
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
            assert_error_names_the_damage(outcome, name)
    assert loud > 500, "too many flips had no effect"


def assert_error_names_the_damage(error: str, name: str) -> None:
    """The error must name the file or, where a stream is damaged, the stream and the position."""
    if name.endswith(".pack"):
        assert name in error
        assert "stream '" in error or "trailer" in error or "checksums" in error or "directory" in error, error
        if "stream '" in error:
            assert "at position" in error
    elif name.endswith(".log"):
        assert name in error or "log" in error, error
    elif name.endswith("MANIFEST"):
        # A manifest without its last section misses what that added, or still refers to what it removed.
        assert (
            "MANIFEST" in error or "is missing" in error or "are missing" in error or "not in the checkpoint" in error
        ), error
    else:
        assert "FORMAT" in error or "format" in error or "written by storage mode" in error, error


def without_lock(disk: Disk) -> Disk:
    return {name: data for name, data in disk.items() if not name.endswith("LOCK")}


def test_check_finds_what_a_server_would_fail_on(store: tuple[Disk, Dump], long: bool) -> None:
    disk, expected = store
    filesystem = FaultyFilesystem(Random(1))
    random = Random(3)
    sample = places(disk, long)
    for name, at in sample if long else sample[:150]:
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


def test_check_of_an_intact_store_finds_nothing(store: tuple[Disk, Dump]) -> None:
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


def test_check_names_every_damaged_stream() -> None:
    bench = Bench()
    for name in ("one", "two", "three"):
        bench.process.create(name, name.encode() * 4000)
    bench.process.commit()
    bench.save()
    bench.process.storage.close()
    disk = bench.filesystem.snapshot()
    pack = next(name for name in disk if name.endswith(".pack"))
    damaged = bytearray(disk[pack])
    damaged[0] ^= 1
    damaged[20_000] ^= 1
    bench.filesystem.restore({**disk, pack: bytes(damaged)})
    findings = list(find_damage(bench.filesystem, DATA))
    assert {finding.path.name for finding in findings} == {pack.rpartition("/")[2]}
    report = " ".join(map(str, findings))
    assert all(f"stream '{name}'" in report for name in ("one", "two", "three"))
    assert all(finding.byte_position is not None for finding in findings)


def test_missing_files_are_reported(store: tuple[Disk, Dump]) -> None:
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


def test_clean_shutdown_mark_distinguishes_damage_from_a_torn_write() -> None:
    """After a clean shutdown the last batch is known to be complete, so a flipped bit in it is not a torn write."""
    bench = Bench()
    bench.process.create("a", b"the last thing written")
    bench.process.commit()
    log = "/data/log/0000000000000001.log"
    for rested in (False, True):
        if rested:
            bench.process.rest()
        disk = bench.filesystem.snapshot()
        damaged = bytearray(disk[log])
        damaged[damaged.index(b"last thing")] ^= 1
        other = FaultyFilesystem(Random(1))
        other.restore({**disk, log: bytes(damaged)})
        if rested:
            with pytest.raises(CorruptError, match="damaged at byte 64"):
                SimulatedProcess(other, Random(1))
        else:
            assert not SimulatedProcess(other, Random(1)).catalog.by_id
