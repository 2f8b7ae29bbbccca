"""The power fails at any moment: what was acknowledged is still there, because it was synced before.

LMDB is not behind the file-system interface, so its syncs are proved from below, and with them those of the journal and
of the checkpoint file: strace records what a process that appends to a store writes, syncs and renames and when it
acknowledges, and the disk is rebuilt as a power cut at a given moment may leave it, with what was not synced kept,
dropped, zeroed or garbled by the sector. A start on that disk is judged by the same oracle as after kill -9.
Stores that leave out a sync must be found out.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.acid.driving import open_acid
from tests.storage.acid.oracle import Oracle, Violation
from tests.storage.acid.tracing import Trace, cut, read_trace, record
from tests.storage.acid.victim import LAX, SHARDS, UNSYNCED

BATCHES = 40


def run_traced(home: Path, seed: int, *fault: str) -> Trace:
    """A store in `before`, and the trace of a process that used it afterwards."""
    before, used = home / "before", home / "used"
    store = open_acid(before, SHARDS, 2**26, 2**20)
    list(store.recover())
    store.close()
    shutil.copytree(before, used, ignore=shutil.ignore_patterns("LOCK", "lock.mdb"))
    record(
        [sys.executable, "-m", "tests.storage.acid.victim", str(used), str(seed), json.dumps({}), str(BATCHES), *fault],
        home / "trace",
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return read_trace(home / "trace")


def judge(trace: Trace, home: Path, at: int, seed: int) -> None:
    after = home / "after"
    cut(trace, at, home / "before", home / "used", after, random.Random(seed))
    oracle = Oracle()
    for moment, line in trace.said:
        if moment < at:
            oracle.hear(line)
    try:
        oracle.judge(after)
    except Violation as violation:
        violation.add_note(f"cut at line {at} of {home / 'trace'}, seed {seed}")
        raise
    shutil.rmtree(after)


def judge_all(trace: Trace, home: Path, count: int | None) -> None:
    """At so many moments from the first batch on, or at every one."""
    lines = range(trace.said[0][0], trace.length + 2)
    chosen = random.Random(1).sample(lines, count) if count is not None and count < len(lines) else lines
    for number, at in enumerate(chosen):
        judge(trace, home, at, number)


@pytest.mark.timeout(1800)
def test_what_was_acknowledged_survives_a_power_cut(tmp_path: Path, long: bool) -> None:
    trace = run_traced(tmp_path, 7_000)
    assert sum(line.startswith("ack") for _, line in trace.said) == BATCHES
    assert len(trace.syncs) >= BATCHES
    judge_all(trace, tmp_path, None if long else 120)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", sorted([*LAX, *UNSYNCED]))
def test_a_store_that_leaves_out_a_sync_is_found_out(tmp_path: Path, fault: str) -> None:
    trace = run_traced(tmp_path, 7_000, fault)
    with pytest.raises(Violation):
        judge_all(trace, tmp_path, 400)
