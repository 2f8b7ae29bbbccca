"""kill -9 in the middle of everything, generation after generation, and what must be left of it."""

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

from tests.storage.acid.oracle import Oracle, Violation
from tests.storage.acid.victim import FAULTS


def live_and_die(directory: Path, seed: int, oracle: Oracle, fault: str | None) -> None:
    """One generation: recover, append, be killed at a moment that nothing prepared for."""
    dice = random.Random(seed)
    arguments = [str(directory), str(seed), json.dumps(oracle.acknowledged), "0", *([fault] if fault else [])]
    said = directory.with_name("said")
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.storage.acid.victim", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    try:
        if dice.random() < 0.8:
            while process.poll() is None and not said.read_bytes().startswith(b"ready\n"):
                time.sleep(0.005)
            time.sleep(dice.uniform(0.0, 0.15))
        else:
            # Somewhere in its start: before, in, or just after recovery.
            time.sleep(dice.uniform(0.1, 0.5))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    text = said.read_text()
    if process.returncode != -signal.SIGKILL:
        raise Violation(f"the process ended by itself: {text[-2000:]}")
    for line in text[: text.rfind("\n") + 1].splitlines():
        oracle.hear(line)


def survive(home: Path, rounds: int, seed: int, fault: str | None = None) -> int:
    """So many generations on one directory; each is judged on a copy, so that none of them ever closes it cleanly."""
    oracle = Oracle()
    directory, copy = home / "store", home / "copy"
    for number in range(rounds):
        live_and_die(directory, seed + number, oracle, fault)
        if not (directory / "acid").exists():
            assert not oracle.acknowledged
            oracle.unknown = None
            continue
        shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("LOCK", "lock.mdb"))
        try:
            oracle.judge(copy)
        except Violation as violation:
            violation.add_note(f"seed {seed}, round {number}")
            raise
        shutil.rmtree(copy)
    return sum(oracle.acknowledged.values())


@pytest.mark.timeout(900)
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, long: bool) -> None:
    appended = survive(tmp_path, 150 if long else 20, seed=4_000)
    assert appended > 100, "the processes were killed before they did anything worth judging"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_oracle_notices_a_broken_store(tmp_path: Path, fault: str) -> None:
    with pytest.raises(Violation):
        survive(tmp_path, 40, seed=5_000, fault=fault)
