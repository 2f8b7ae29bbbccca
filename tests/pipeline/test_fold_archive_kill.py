"""Kill -9 at any moment, with everything below it: folds and lakes are what was written, each message once.

The commands themselves are killed, `headwater fold` and `headwater archive run`, while events are appended. The judges
are plain HTTP, SQL and Parquet. `HEADWATER_KILL_ROUNDS` sets how often (1 by default, 20 with --long); the seed is in
the message of a failure.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from headwater.pipeline.archive.table import ArchiveTable
from headwater.pipeline.fold.state import FoldState
from headwater.stack.database import LocalPostgres
from tests.pipeline.buckets import Bucket
from tests.pipeline.test_archive import held
from tests.pipeline.test_fold import event, rows
from tests.serving import serve
from tests.spark.processes import kill_group
from tests.spark.session import REPOSITORY, require_java, worker_environment
from tests.waiting import wait_until

# Minutes each: drivers are started and killed. Repeated and half-done batches have quick tests of their own.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

STREAMS = 20
START_TIMEOUT_S = 300.0
FINISH_TIMEOUT_S = 300.0


class Driver:
    """A command in a process group of its own, with its JVM and Python workers."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater", *arguments, "--progress"],
            cwd=log.parent,
            env=os.environ | worker_environment() | {"PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,
        )

    def kill(self) -> None:
        kill_group(self.process)
        self._log.close()


class Feeder(threading.Thread):
    """Appends all the while, each event once."""

    def __init__(self, bucket: Bucket, rng: random.Random) -> None:
        super().__init__(name="feeder", daemon=True)
        self._root = bucket.root
        self._rng = rng
        self._done = threading.Event()
        self.sent: dict[str, list[dict[str, Any]]] = {f"s{number}": [] for number in range(STREAMS)}
        self.trouble: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(timeout=30.0) as http:
                while not self._done.wait(0.05):
                    name = self._rng.choice(list(self.sent))
                    news = [event(self._rng) for _ in range(self._rng.randrange(1, 20))]
                    http.post(f"{self._root}/{name}", json=news).raise_for_status()
                    self.sent[name] += news
        except BaseException as error:
            self.trouble = error

    def stop(self) -> None:
        self._done.set()
        self.join(timeout=60)
        assert self.trouble is None, f"the feeder failed: {self.trouble!r}"


def killed_and_finished(
    tmp_path: Path,
    places: Path,
    long: bool,
    arguments: Callable[[Bucket, str], list[str]],
    is_done: Callable[[Bucket, Feeder], bool],
) -> tuple[Bucket, Feeder, str]:
    """Kill the command again and again while events come, then let it finish."""
    require_java()
    rounds = int(os.environ.get("HEADWATER_KILL_ROUNDS", "20" if long else "1"))
    seed = int(os.environ.get("HEADWATER_KILL_SEED", str(random.randrange(2**32))))
    rng = random.Random(seed)
    log = tmp_path / "driver.log"
    what = f"seed {seed}, {rounds} kills"
    with (
        serve(DS_STORAGE__MODE="memory", DS_LIMITS__MAX_STREAM_BYTES="0") as server,
        httpx.Client(timeout=30.0) as http,
    ):
        bucket = Bucket(server, http, "kills")
        feeder = Feeder(bucket, random.Random(seed + 1))
        for name in feeder.sent:
            bucket.create(name)
        feeder.start()
        try:
            for _ in range(rounds):
                before = _batches(places)
                driver = Driver(log, *arguments(bucket, server.url))
                try:
                    seen = log.stat().st_size

                    # Until a new batch is under way, or the one that was broken off is done: then at any moment.
                    def has_batch(driver: Driver = driver, seen: int = seen, before: Any = before) -> bool:
                        assert driver.process.poll() is None, f"{what}:\n{log.read_text()[-3000:]}"
                        return log.read_bytes()[seen:].count(b": batch") > 0 or _batches(places) != before

                    wait_until(has_batch, what=f"a batch; {what}", limit_s=START_TIMEOUT_S, every_s=0.1)
                    time.sleep(rng.uniform(0.0, 4.0))
                finally:
                    driver.kill()
        finally:
            feeder.stop()
        driver = Driver(log, *arguments(bucket, server.url))
        try:

            def done() -> bool:
                assert driver.process.poll() is None, f"the last one failed; {what}:\n{log.read_text()[-3000:]}"
                return is_done(bucket, feeder)

            wait_until(done, what=what, limit_s=FINISH_TIMEOUT_S, every_s=0.5)
        finally:
            driver.kill()
        judge(bucket, feeder.sent, what)
    return bucket, feeder, what


def _batches(places: Path) -> set[str]:
    return {path.name for path in (places / "offsets").glob("[0-9]*")} if places.exists() else set()


def judge(bucket: Bucket, sent: dict[str, list[dict[str, Any]]], what: str) -> None:
    """Whatever was done to them, clients see the whole state."""
    for name, events in sent.items():
        state = FoldState().apply_all(json.dumps(one, separators=(",", ":")).encode() for one in events)
        mine = {key: json.loads(entry.value) for key, entry in bucket.bootstrapped(name).entries.items()}
        assert mine == {key: json.loads(entry.value) for key, entry in state.entries.items()}, f"{name}; {what}"


def test_a_fold_that_is_killed(tmp_path: Path, long: bool, postgres: LocalPostgres, postgres_url: str) -> None:
    def arguments(bucket: Bucket, url: str) -> list[str]:
        places = str(tmp_path / "checkpoints")
        table = ["--table", "folds", "--postgres", postgres_url]
        return ["fold", "--bucket", bucket.name, *table, "--checkpoints", places, "--url", url]

    def is_done(bucket: Bucket, feeder: Feeder) -> bool:
        tails = {name: bucket.tail(name) for name, events in feeder.sent.items() if events}
        with psycopg.connect(postgres_url) as connection:
            places: dict[str, str] = dict(connection.execute("SELECT stream, ds_offset FROM folds_places").fetchall())
        return places == tails and all(bucket.snapshot_offset(name) == tail for name, tail in tails.items())

    _, feeder, what = killed_and_finished(tmp_path, tmp_path / "checkpoints" / "fold", long, arguments, is_done)
    table = rows(postgres_url)
    for name, events in feeder.sent.items():
        state = FoldState().apply_all(json.dumps(one).encode() for one in events)
        expected = {key: json.loads(entry.value) for key, entry in state.entries.items()}
        assert table.get(name, {}) == expected, f"{name}; {what}"


def test_an_archive_that_is_killed(tmp_path: Path, long: bool) -> None:
    lake = tmp_path / "lake"

    def arguments(bucket: Bucket, url: str) -> list[str]:
        return ["archive", "run", "--lake", str(lake), "--bucket", bucket.name, "--trim", "fold", "--url", url]

    def is_done(bucket: Bucket, feeder: Feeder) -> bool:
        streams = ArchiveTable(lake).positions()
        return all(name in streams and streams[name].offset == bucket.tail(name) for name in feeder.sent)

    _, feeder, what = killed_and_finished(tmp_path, lake / "_checkpoints" / "archive", long, arguments, is_done)
    assert held(lake) == {name: events for name, events in feeder.sent.items() if events}, what
