"""Processes on one `acid` store are killed with SIGKILL at random moments; acknowledged writes must survive."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.storage.acid.crash_child import FAULTS
from tests.storage.acid.oracle import Oracle, Violation

ENOUGH = 100
EXTENSION = 10


def run_until_killed(directory: Path, seed: int, oracle: Oracle, fault: str | None) -> None:
    """Run one process: it recovers, appends, and is killed at a random moment."""
    dice = random.Random(seed)
    arguments = [str(directory), str(seed), json.dumps(oracle.acknowledged), "0", *([fault] if fault else [])]
    said = directory.with_name("said")
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.storage.acid.crash_child", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    try:
        if dice.random() < 0.8:
            while process.poll() is None and not is_ready(said):
                time.sleep(0.005)
            time.sleep(dice.uniform(0.0, 0.15))
        else:
            # Kill it during startup: before, during or just after recovery.
            time.sleep(dice.uniform(0.1, 0.5))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    text = said.read_text()
    if process.returncode != -signal.SIGKILL:
        raise Violation(f"the process ended before it was killed: {text[-2000:]}")
    for line in text[: text.rfind("\n") + 1].splitlines():
        oracle.read_line(line)


def is_ready(said: Path) -> bool:
    """Whether the process has recovered. Before that it may report what it found, such as an unfinished write."""
    with said.open("rb") as lines:
        return b"ready\n" in lines.readlines(64 * 1024)


def run_generations(home: Path, rounds: int, seed: int, fault: str | None = None) -> int:
    """Run processes one after another on one directory; check copies, so that the directory is never closed cleanly.

    On a slow machine they write less before they are killed, so there are more of them until they have written enough.
    """
    oracle = Oracle()
    directory, copy = home / "store", home / "copy"
    for number in range(EXTENSION * rounds):
        if number >= rounds and sum(oracle.acknowledged.values()) > ENOUGH:
            break
        run_until_killed(directory, seed + number, oracle, fault)
        if not (directory / "acid").exists():
            assert not oracle.acknowledged
            oracle.unknown = None
            continue
        shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("LOCK", "lock.mdb"))
        try:
            oracle.check(copy)
        except Violation as violation:
            violation.add_note(f"seed {seed}, round {number}")
            raise
        shutil.rmtree(copy)
    return sum(oracle.acknowledged.values())


@pytest.mark.timeout(900)
def test_acknowledged_writes_survive_kill_9(tmp_path: Path, long: bool) -> None:
    appended = run_generations(tmp_path, 150 if long else 8, seed=4_000)
    assert appended > ENOUGH, "the processes were killed before they wrote enough"


@pytest.mark.long
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_oracle_detects_a_broken_store(tmp_path: Path, fault: str) -> None:
    with pytest.raises(Violation):
        run_generations(tmp_path, 40, seed=5_000, fault=fault)
