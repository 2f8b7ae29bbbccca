"""Power cuts at any moment: acknowledged records survive, because they were synced before.

LMDB does not use the file-system interface, so its syncs are observed with strace, together with those of the journal
and of the checkpoint file. strace records what a process writes, syncs and renames and when it acknowledges. From that,
the test rebuilds the disk as a power cut may leave it, with unsynced sectors kept, dropped, zeroed or garbled, and
checks a start on that disk with the same oracle as after kill -9. Stores that omit a sync must be detected.
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

from tests.storage.acid.crash_child import LAX, SHARDS, UNSYNCED
from tests.storage.acid.driver import open_acid
from tests.storage.acid.oracle import Oracle, Violation
from tests.storage.acid.tracing import Trace, cut, read_trace, record

BATCHES = 40


def run_traced(home: Path, seed: int, *fault: str) -> Trace:
    """Create a store in `before` and record the trace of a process that uses a copy of it."""
    before, used = home / "before", home / "used"
    store = open_acid(before, SHARDS, 2**26, 2**20)
    list(store.recover())
    store.close()
    shutil.copytree(before, used, ignore=shutil.ignore_patterns("LOCK", "lock.mdb"))
    record(
        [
            sys.executable,
            "-m",
            "tests.storage.acid.crash_child",
            str(used),
            str(seed),
            json.dumps({}),
            str(BATCHES),
            *fault,
        ],
        home / "trace",
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return read_trace(home / "trace")


def check(trace: Trace, home: Path, at: int, seed: int) -> None:
    after = home / "after"
    cut(trace, at, home / "before", home / "used", after, random.Random(seed))
    oracle = Oracle()
    for moment, line in trace.said:
        if moment < at:
            oracle.read_line(line)
    try:
        oracle.check(after)
    except Violation as violation:
        violation.add_note(f"cut at line {at} of {home / 'trace'}, seed {seed}")
        raise
    shutil.rmtree(after)


def check_all(trace: Trace, home: Path, count: int | None) -> None:
    """Check `count` moments after the first batch, or every moment."""
    lines = range(trace.said[0][0], trace.length + 2)
    chosen = random.Random(1).sample(lines, count) if count is not None and count < len(lines) else lines
    for number, at in enumerate(chosen):
        check(trace, home, at, number)


@pytest.mark.timeout(1800)
def test_acknowledged_writes_survive_a_power_cut(tmp_path: Path, long: bool) -> None:
    trace = run_traced(tmp_path, 7_000)
    assert sum(line.startswith("ack") for _, line in trace.said) == BATCHES
    assert len(trace.syncs) >= BATCHES
    check_all(trace, tmp_path, None if long else 50)


@pytest.mark.parametrize("fault", sorted([*LAX, *UNSYNCED]))
def test_store_that_omits_a_sync_is_detected(tmp_path: Path, fault: str) -> None:
    trace = run_traced(tmp_path, 7_000, fault)
    with pytest.raises(Violation):
        check_all(trace, tmp_path, 400)
