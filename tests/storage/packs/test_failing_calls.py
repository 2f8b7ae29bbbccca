"""One scenario, run again for every call that it makes to the file system, with that call failing or being the last.

Whatever fails, nothing acknowledged is lost, nothing is acknowledged after a failed write, and reads go on.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress

import pytest

from headwater.storage.interface import CorruptError, StorageError
from tests.storage.faulty_filesystem import Crashed
from tests.storage.simulation import Life, Simulation

SEED = 4
STEPS = 40


class Scenario(Simulation):
    """A first start, a good deal of work with checkpoints and rewrites, a clean end, and a second start."""

    def __init__(self, seed: int = SEED) -> None:
        super().__init__(seed)
        self.life: Life | None = None
        self.boot_failures = 0

    def play(self) -> None:
        self.life = life = Life(self.filesystem, self.random)
        for step in range(STEPS):
            self._unless_refused(life, lambda: self.step(life))
            if step % 10 == 9:
                life.rest()
        self._unless_refused(life, life.commit)
        for _ in range(10):
            self._unless_refused(life, life.check_reads)
        life.storage.close()

    def _unless_refused(self, life: Life, act: Callable[[], None]) -> None:
        """A call may fail by an error of the disk, loudly: one read, or this write and all that follow."""
        try:
            act()
        except CorruptError as error:
            if "cannot be read" not in str(error) and "cannot be opened" not in str(error):
                raise
        except StorageError:
            if not life.failed:
                raise
            life.queue.clear()

    def verdict(self, *, power: bool) -> None:
        """The machine goes down; a healthy one comes up: what is there?"""
        life = self.life
        self.filesystem.crash(power=power)
        if life is None:
            self.boot([self.model]).storage.close()
        else:
            life.abandon()
            self.boot(life.outcomes()).storage.close()


def clean_calls() -> int:
    scenario = Scenario()
    scenario.play()
    assert scenario.life is not None
    assert not scenario.life.failed
    packs = [name for name in scenario.filesystem.snapshot() if name.endswith(".pack")]
    assert packs, "the scenario is to make checkpoints"
    return scenario.filesystem.calls


def test_the_scenario_goes_through_all_of_the_machinery() -> None:
    """Else failing its calls would prove little."""
    scenario = Scenario()
    scenario.filesystem.traces = True
    scenario.play()
    seen = {(call.split()[1], call.split()[2].rpartition("/")[2][:8]) for call in scenario.filesystem.log}
    verbs = {verb for verb, _ in seen}
    assert {"create", "write", "sync", "sync_directory", "replace", "unlink", "read", "map", "lock"} <= verbs
    assert ("replace", "MANIFEST") in seen
    unlinked = {call.rpartition(".")[2] for call in scenario.filesystem.log if " unlink " in call}
    assert unlinked == {"log", "pack"}


@pytest.mark.parametrize("power", [True, False], ids=["power loss", "kill"])
def test_a_crash_in_every_call(power: bool, long: bool) -> None:
    calls = clean_calls()
    assert calls > 300
    for number in range(1, calls + 1, 1 if long else 5):
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
def test_an_error_of_every_call(code: str, long: bool) -> None:
    calls = clean_calls()
    for number in range(1, calls + 1, 1 if long else 7):
        fail_call(number, getattr(errno, code))


def fail_call(number: int, code: int) -> None:
    scenario = Scenario()
    scenario.filesystem.faults[number] = code
    try:
        try:
            scenario.play()
        except StorageError:
            # The first start failed, and said so. Another attempt finds no trace of it.
            if scenario.life is not None:
                raise
            scenario.filesystem.crash(power=False)
            scenario.play()
        scenario.verdict(power=True)
    except AssertionError as error:
        raise AssertionError(f"{errno.errorcode[code]} in call {number}: {error}") from error


def test_every_write_cut_short(long: bool) -> None:
    """A write that takes only a part is nothing but a longer way to the same end."""
    calls = clean_calls()
    for number in range(1, calls + 1, 1 if long else 5):
        scenario = Scenario()
        scenario.filesystem.short_writes = {number, number + 1}
        scenario.play()
        assert scenario.life is not None
        assert not scenario.life.failed
        scenario.verdict(power=True)


def test_a_disk_that_is_full_from_some_call_on(long: bool) -> None:
    calls = clean_calls()
    for number in range(1, calls + 1, 1 if long else 7):
        scenario = Scenario()
        scenario.filesystem.full_from = number
        try:
            scenario.play()
        except StorageError:
            if scenario.life is not None:
                raise
        try:
            scenario.verdict(power=True)
        except AssertionError as error:
            raise AssertionError(f"full from call {number}: {error}") from error


def test_an_error_of_every_call_of_a_recovery() -> None:
    """A start that meets an error fails and says why; it never goes on without what it could not read."""
    scenario = Scenario()
    scenario.play()
    assert scenario.life is not None
    model = scenario.life.model
    disk = scenario.filesystem.snapshot()
    filesystem = scenario.filesystem
    filesystem.restore(disk)
    filesystem.calls = 0
    Life(filesystem, scenario.random)
    calls = filesystem.calls
    assert calls > 20
    for code in (errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EACCES):
        for number in range(1, calls + 1):
            filesystem.restore(disk)
            filesystem.calls = 0
            filesystem.faults[number] = code
            # On a full disk a file that cannot be rewritten stays as it is.
            with suppress(StorageError) if code == errno.ENOSPC else pytest.raises(StorageError):
                Life(filesystem, scenario.random)
            filesystem.crash(power=True)
            scenario.boot([model])
