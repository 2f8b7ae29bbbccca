"""One scenario, repeated for every call that it makes to the file system, with an error or a crash in that call.

In every case no acknowledged record is lost, nothing is acknowledged after a failed write, and reads still work.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress

import pytest

from headwater.storage.interface import CorruptError, StorageError
from tests.storage.faulty_filesystem import Crashed
from tests.storage.simulation import SimulatedProcess, Simulation

SEED = 4
STEPS = 40


class Scenario(Simulation):
    """A first start, work with checkpoints and rewrites, a clean shutdown, and a second start."""

    def __init__(self, seed: int = SEED) -> None:
        super().__init__(seed)
        self.process: SimulatedProcess | None = None
        self.boot_failures = 0

    def play(self) -> None:
        self.process = process = SimulatedProcess(self.filesystem, self.random)
        for step in range(STEPS):
            self._unless_refused(process, lambda: self.step(process))
            if step % 10 == 9:
                process.rest()
        self._unless_refused(process, process.commit)
        for _ in range(10):
            self._unless_refused(process, process.check_reads)
        process.storage.close()

    def _unless_refused(self, process: SimulatedProcess, act: Callable[[], None]) -> None:
        """Run a call that may fail with a disk error: one read, or this write and all later ones."""
        try:
            act()
        except CorruptError as error:
            if "cannot be read" not in str(error) and "cannot be opened" not in str(error):
                raise
        except StorageError:
            if not process.failed:
                raise
            process.queue.clear()

    def verdict(self, *, power: bool) -> None:
        """Crash the machine, restart without faults, and check what is stored."""
        process = self.process
        self.filesystem.crash(power=power)
        if process is None:
            self.boot([self.model]).storage.close()
        else:
            process.abandon()
            self.boot(process.outcomes()).storage.close()


def clean_calls() -> int:
    scenario = Scenario()
    scenario.play()
    assert scenario.process is not None
    assert not scenario.process.failed
    packs = [name for name in scenario.filesystem.snapshot() if name.endswith(".pack")]
    assert packs, "the scenario must make checkpoints"
    return scenario.filesystem.calls


def test_scenario_exercises_every_mechanism() -> None:
    """Otherwise failing its calls would prove little."""
    scenario = Scenario()
    scenario.filesystem.traces = True
    scenario.play()
    seen = {(call.split()[1], call.split()[2].rpartition("/")[2][:8]) for call in scenario.filesystem.log}
    verbs = {verb for verb, _ in seen}
    assert {
        "create",
        "overwrite",
        "write",
        "sync",
        "sync_directory",
        "replace",
        "unlink",
        "read",
        "map",
        "lock",
    } <= verbs
    assert ("replace", "MANIFEST") in seen
    unlinked = {call.rpartition(".")[2] for call in scenario.filesystem.log if " unlink " in call}
    assert {"log", "pack"} <= unlinked


@pytest.mark.parametrize("power", [True, False], ids=["power loss", "kill"])
def test_crash_in_any_call_loses_nothing_acknowledged(power: bool, long: bool) -> None:
    calls = clean_calls()
    assert calls > 300
    for number in range(1, calls + 1, 1 if long else 13):
        scenario = Scenario()
        scenario.filesystem.crash_at = number
        try:
            scenario.play()
        except (Crashed, StorageError):
            assert scenario.filesystem.dead, f"call {number}"
        try:
            scenario.verdict(power=power)
        except AssertionError as error:
            raise AssertionError(f"crash in call {number}: {error}") from error


@pytest.mark.parametrize("code", ["EIO", "ENOSPC", "EMFILE"])
def test_error_of_any_call_loses_nothing_acknowledged(code: str, long: bool) -> None:
    calls = clean_calls()
    for number in range(1, calls + 1, 1 if long else 17):
        fail_call(number, getattr(errno, code))


def fail_call(number: int, code: int) -> None:
    scenario = Scenario()
    scenario.filesystem.faults[number] = code
    try:
        try:
            scenario.play()
        except StorageError:
            # The first start failed with an error. Another attempt finds an empty directory.
            if scenario.process is not None:
                raise
            scenario.filesystem.crash(power=False)
            scenario.play()
        scenario.verdict(power=True)
    except AssertionError as error:
        raise AssertionError(f"{errno.errorcode[code]} in call {number}: {error}") from error


def test_short_writes_lose_nothing(long: bool) -> None:
    """A write that accepts only a part of its bytes is continued."""
    calls = clean_calls()
    for number in range(1, calls + 1, 1 if long else 13):
        scenario = Scenario()
        scenario.filesystem.short_writes = {number, number + 1}
        scenario.play()
        assert scenario.process is not None
        assert not scenario.process.failed
        scenario.verdict(power=True)


def test_disk_full_from_any_call_loses_nothing_acknowledged(long: bool) -> None:
    calls = clean_calls()
    for number in range(1, calls + 1, 1 if long else 17):
        scenario = Scenario()
        scenario.filesystem.full_from = number
        try:
            scenario.play()
        except StorageError:
            if scenario.process is not None:
                raise
        try:
            scenario.verdict(power=True)
        except AssertionError as error:
            raise AssertionError(f"full from call {number}: {error}") from error


def test_error_of_any_call_of_a_recovery_fails_the_start() -> None:
    """A start with an error fails and reports it; it never continues without data that it could not read."""
    scenario = Scenario()
    scenario.play()
    assert scenario.process is not None
    model = scenario.process.model
    disk = scenario.filesystem.snapshot()
    filesystem = scenario.filesystem
    filesystem.restore(disk)
    filesystem.calls = 0
    SimulatedProcess(filesystem, scenario.random)
    calls = filesystem.calls
    assert calls > 20
    for code in (errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EACCES):
        for number in range(1, calls + 1):
            filesystem.restore(disk)
            filesystem.calls = 0
            filesystem.faults[number] = code
            # On a full disk a file that cannot be rewritten stays as it is.
            with suppress(StorageError) if code == errno.ENOSPC else pytest.raises(StorageError):
                SimulatedProcess(filesystem, scenario.random)
            filesystem.crash(power=True)
            scenario.boot([model])
