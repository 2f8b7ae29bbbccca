"""After a failed sync and a restart, data that is only in the page cache is made durable before it is used."""

from __future__ import annotations

import errno
from random import Random

import pytest

from headwater.storage.interface import StorageError, WriteFailedError
from tests.storage.faulty_filesystem import Crashed, FaultyFilesystem
from tests.storage.model import Model, difference, model_of
from tests.storage.packs.test_checkpoints import ROOMY
from tests.storage.simulation import SimulatedProcess

SEEDS = range(12)


def failed_append(seed: int) -> tuple[FaultyFilesystem, list[Model]]:
    """Run a process that ends after a failed sync of a batch; return the two states that are possible afterwards."""
    filesystem = FaultyFilesystem(Random(seed))
    process = SimulatedProcess(filesystem, Random(seed))
    process.create("a", b"kept" * 100)
    process.commit()
    process.append("a", b"doubtful" * 200)
    filesystem.fails_on["sync", ".log"] = errno.EIO
    with pytest.raises(WriteFailedError):
        process.commit()
    filesystem.crash(power=False)
    return filesystem, process.outcomes()


def failed_checkpoint(seed: int) -> tuple[FaultyFilesystem, list[Model]]:
    """Run a process that ends after a failed sync of the manifest."""
    filesystem = FaultyFilesystem(Random(seed))
    process = SimulatedProcess(filesystem, Random(seed), settings=ROOMY)
    for name in "abcdef":
        process.create(name, name.encode() * 2000)
        process.commit()
    assert len([name for name in filesystem.snapshot() if name.endswith(".log")]) > 2, "a start removes old segments"
    process.storage.checkpoint_soon()
    filesystem.fails_on["sync", "MANIFEST"] = errno.EIO
    process.rest()
    assert process.storage.refusal() is not None
    filesystem.crash(power=False)
    process.abandon()
    return filesystem, process.outcomes()


def recovered(filesystem: FaultyFilesystem, possible: list[Model]) -> SimulatedProcess:
    process = SimulatedProcess(filesystem, Random(9))
    found = model_of(process.catalog, process.storage)
    for model in possible:
        if model.dump() == found.dump():
            process.begin_from(model.copy())
            return process
    raise AssertionError(difference(possible[0].dump(), found.dump()))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_read_back_after_a_failed_sync_survives_a_power_cut(seed: int) -> None:
    filesystem, possible = failed_append(seed)
    process = recovered(filesystem, possible)
    process.append("a", b"more")
    process.commit()
    filesystem.crash(power=True)
    recovered(filesystem, [process.model])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_checkpoint_read_back_after_a_failed_sync_survives_a_power_cut(seed: int) -> None:
    filesystem, possible = failed_checkpoint(seed)
    process = recovered(filesystem, possible)
    process.append("a", b"more")
    process.commit()
    filesystem.crash(power=True)
    recovered(filesystem, [process.model])


@pytest.mark.parametrize("scenario", [failed_append, failed_checkpoint])
@pytest.mark.parametrize("power", [True, False], ids=["power loss", "kill"])
def test_crash_in_any_call_of_the_renewal_loses_nothing(scenario: object, power: bool) -> None:
    assert callable(scenario)
    filesystem, possible = scenario(3)
    before = filesystem.calls
    recovered(filesystem, possible)
    calls = filesystem.calls - before
    assert calls > 10
    for number in range(1, calls + 1):
        filesystem, possible = scenario(3)
        filesystem.crash_at = filesystem.calls + number
        try:
            recovered(filesystem, possible)
        except (Crashed, StorageError):
            assert filesystem.dead
        filesystem.crash(power=power)
        process = recovered(filesystem, possible)
        process.append("a", b"more")
        process.commit()
        filesystem.crash(power=True)
        recovered(filesystem, [process.model])


def test_a_full_disk_does_not_keep_the_server_from_starting() -> None:
    filesystem, possible = failed_append(3)
    filesystem.full_from = filesystem.calls
    filesystem.fails_on["write", ".new"] = errno.ENOSPC
    with pytest.raises(StorageError):
        # There is no space for the header of a new segment either; the error says so.
        SimulatedProcess(filesystem, Random(9))
    filesystem.crash(power=False)
    filesystem.fails_on["write", ".new"] = errno.ENOSPC
    recovered(filesystem, possible)
