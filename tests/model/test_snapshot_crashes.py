"""Snapshots and retention over the real stores, with restarts and with power cuts in the middle of any step.

The simulation of `tests.engine.retention_simulation` runs over packs and over LMDB with restarts, and over a simulated
disk that loses unsynced data. There, a step interrupted by a power cut is applied completely or not at all, and
completely if it was answered; blobs that no stream refers to are removed at the restart.
"""

from __future__ import annotations

import shutil
import tempfile
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest

from headwater.core.errors import Refusal
from headwater.storage.blobs import BlobStore, FileBlobs
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import Storage
from headwater.storage.journaled_store import StoreSettings
from headwater.storage.packs.pack_store import file_storage
from tests.engine.retention_simulation import RetentionSimulation
from tests.storage.acid.driver import open_acid
from tests.storage.faulty_filesystem import Crashed, FaultyFilesystem
from tests.storage.simulation import DATA, SteppedWorker, Ticks

TINY = StoreSettings(segment_bytes=4096, hot_tail_bytes=256)
BLOBS = DATA.parent / "blobs"
CUT_STEPS = ("append", "fork", "publish", "publish", "delete", "create", "create_bounded", "drop", "drop")


class StoredSimulation(RetentionSimulation):
    """The simulation over a real store in a directory."""

    def __init__(self, seed: int, mode: str) -> None:
        self.mode = mode
        self.root = Path(tempfile.mkdtemp(prefix="headwater-model-"))
        super().__init__(seed)

    def open(self) -> tuple[Storage, BlobStore]:
        filesystem = RealFilesystem()
        durable = self.mode == "file-durable"
        blobs = FileBlobs(filesystem, self.root / "blobs", durable=durable)
        if self.mode == "acid":
            return open_acid(self.root / "data", 2, 16 * 1024 * 1024, 256), blobs
        return file_storage(filesystem, self.root / "data", durable=durable, settings=TINY), blobs

    def crash(self) -> None:
        self.run_until_idle()
        self.storage.close()
        super().crash()

    def discard(self) -> None:
        self.storage.close()
        shutil.rmtree(self.root)


class PowerCutSimulation(RetentionSimulation):
    """The simulation on a disk that can lose power within a step."""

    def __init__(self, seed: int) -> None:
        self.disk = FaultyFilesystem(Random(seed + 1))
        self.answered = False
        self.cuts = 0
        self.kept = 0
        super().__init__(seed)

    def open(self) -> tuple[Storage, BlobStore]:
        mounted = self.disk.mount()
        storage = file_storage(mounted, DATA, durable=True, settings=TINY, worker=SteppedWorker(), clock=Ticks(0.0005))
        return storage, FileBlobs(mounted, BLOBS, durable=True)

    def must_work(self, result: object) -> None:
        if not self.disk.dead:
            super().must_work(result)
            self.answered = True

    def crash(self) -> None:
        self.run_until_idle()
        self.disk.crash(power=True)
        super().crash()

    def cut(self) -> None:
        """Run one step with a power cut at a random call."""
        self.run_until_idle()
        for stream in self.streams:
            while stream.pins:
                stream.pins.pop()[1].release()
        before = deepcopy((self.streams, self.names))
        self.answered = False
        self.disk.crash_at = self.disk.calls + self.random.randint(1, 12)
        step = self.random.choice(CUT_STEPS)
        try:
            getattr(self, step)()
            self.run_until_idle()
        except Crashed:
            pass
        died = self.disk.dead
        self.cuts += died
        after = (self.streams, self.names)
        self.disk.crash(power=True)
        self.start()
        if died and step == "drop":
            # There is one record for each stream: some were trimmed before the power cut, the others are trimmed now.
            self.streams, self.names = before
            self.drop()
            self.run_until_idle()
        if not died or self.answered or step == "drop":
            self.check()
            return
        try:
            self.check()
            self.kept += 1
        except Exception:
            self.streams, self.names = before
            try:
                self.check()
            except Exception as neither:
                raise AssertionError(f"the state is neither {before} nor {after}") from neither


@pytest.mark.parametrize("mode", ["file-fast", "file-durable", "acid"])
@pytest.mark.parametrize("seed", range(3))
def test_snapshots_and_retention_match_the_model_over_a_real_store(mode: str, seed: int, long: bool) -> None:
    for number in range(50 if long else 1):
        simulation = StoredSimulation(seed + 1000 * number, mode)
        try:
            for _ in range(120):
                simulation.step()
            simulation.run_until_idle()
            simulation.check()
        finally:
            simulation.discard()


def run_steps(simulation: PowerCutSimulation) -> None:
    for _ in range(60):
        simulation.step()
        if simulation.random.random() < 0.4:
            simulation.cut()
    simulation.run_until_idle()
    simulation.check()


@pytest.mark.parametrize("seed", range(8))
def test_step_interrupted_by_a_power_cut_is_atomic(seed: int, long: bool) -> None:
    cuts = 0
    for number in range(100 if long else 2):
        simulation = PowerCutSimulation(seed + 1000 * number)
        run_steps(simulation)
        cuts += simulation.cuts
    assert cuts >= 5, "too few steps were interrupted for this test to prove anything"


class UnsyncedBlobs(PowerCutSimulation):
    """A server that refers to a snapshot before the snapshot is synced."""

    def open(self) -> tuple[Storage, BlobStore]:
        storage, _ = super().open()
        return storage, FileBlobs(self.disk.mount(), BLOBS, durable=False)


class ForgetsDrops(PowerCutSimulation):
    """A server that never frees the data that retention dropped."""

    def start(self) -> None:
        super().start()
        self.engine.retention._trim = lambda _: None  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize("broken", [UnsyncedBlobs, ForgetsDrops])
def test_faulty_server_is_detected(broken: type[PowerCutSimulation]) -> None:
    def twenty_times() -> None:
        for seed in range(20):
            run_steps(broken(seed))

    with pytest.raises((AssertionError, Refusal)):
        twenty_times()
