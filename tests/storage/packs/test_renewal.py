"""After a failed sync and a restart, what the page cache still shows is made durable before anything relies on it."""

from __future__ import annotations

import errno
from random import Random

import pytest

from headwater.storage.interface import StorageError, WriteFailedError
from tests.storage.faulty_filesystem import Crashed, FaultyFilesystem
from tests.storage.model import Model, difference, model_of
from tests.storage.packs.test_checkpoints import ROOMY
from tests.storage.simulation import Life

SEEDS = range(12)


def failed_append(seed: int) -> tuple[FaultyFilesystem, list[Model]]:
    """A process that ended after the sync of a batch failed, and the two states that may be found after it."""
    filesystem = FaultyFilesystem(Random(seed))
    life = Life(filesystem, Random(seed))
    life.create("a", b"kept" * 100)
    life.commit()
    life.append("a", b"doubtful" * 200)
    filesystem.fails_on["sync", ".log"] = errno.EIO
    with pytest.raises(WriteFailedError):
        life.commit()
    filesystem.crash(power=False)
    return filesystem, life.outcomes()


def failed_checkpoint(seed: int) -> tuple[FaultyFilesystem, list[Model]]:
    """A process that ended after the sync of the manifest failed."""
    filesystem = FaultyFilesystem(Random(seed))
    life = Life(filesystem, Random(seed), settings=ROOMY)
    for name in "abcdef":
        life.create(name, name.encode() * 2000)
        life.commit()
    assert len([name for name in filesystem.snapshot() if name.endswith(".log")]) > 2, "a start removes old segments"
    life.storage.checkpoint_soon()
    filesystem.fails_on["sync", "MANIFEST"] = errno.EIO
    life.rest()
    assert life.storage.refusal() is not None
    filesystem.crash(power=False)
    life.abandon()
    return filesystem, life.outcomes()


def recovered(filesystem: FaultyFilesystem, possible: list[Model]) -> Life:
    life = Life(filesystem, Random(9))
    found = model_of(life.catalog, life.storage)
    for model in possible:
        if model.dump() == found.dump():
            life.begin_from(model.copy())
            return life
    raise AssertionError(difference(possible[0].dump(), found.dump()))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_read_back_after_a_failed_sync_survives_a_power_cut(seed: int) -> None:
    filesystem, possible = failed_append(seed)
    life = recovered(filesystem, possible)
    life.append("a", b"more")
    life.commit()
    filesystem.crash(power=True)
    recovered(filesystem, [life.model])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_checkpoint_read_back_after_a_failed_sync_survives_a_power_cut(seed: int) -> None:
    filesystem, possible = failed_checkpoint(seed)
    life = recovered(filesystem, possible)
    life.append("a", b"more")
    life.commit()
    filesystem.crash(power=True)
    recovered(filesystem, [life.model])


@pytest.mark.parametrize("scenario", [failed_append, failed_checkpoint])
@pytest.mark.parametrize("power", [True, False], ids=["power loss", "kill"])
def test_a_crash_in_every_call_of_the_renewal(scenario: object, power: bool) -> None:
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
        life = recovered(filesystem, possible)
        life.append("a", b"more")
        life.commit()
        filesystem.crash(power=True)
        recovered(filesystem, [life.model])


def test_a_full_disk_does_not_keep_the_server_from_starting() -> None:
    filesystem, possible = failed_append(3)
    filesystem.full_from = filesystem.calls
    filesystem.fails_on["write", ".new"] = errno.ENOSPC
    with pytest.raises(StorageError):
        # The header of a new segment finds no room either; the error says so.
        Life(filesystem, Random(9))
    filesystem.crash(power=False)
    filesystem.fails_on["write", ".new"] = errno.ENOSPC
    recovered(filesystem, possible)
