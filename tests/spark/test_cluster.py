"""A standalone cluster of a master and two workers, and Spark Connect; both from a wheel."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest

from tests import waiting
from tests.kills.judging import judge_order
from tests.spark.copying import FINISH_TIMEOUT_S, CopyJob, copies_are_complete
from tests.spark.processes import connect_server, environment, installed_wheel, standalone_cluster
from tests.spark.streams import Streams

# Takes minutes each, because real processes are started and killed. Run by `make test-long`.
pytestmark = pytest.mark.long


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def names(stream_name: Callable[[], str]) -> tuple[str, ...]:
    return tuple(stream_name() for _ in range(3))


def judge_copies(streams: Streams, names: Iterable[str], what: str) -> None:
    for name in names:
        judge_order(streams.messages(f"copy-of-{name}"), streams.messages(name), f"{name}; {what}")


@pytest.mark.timeout(600)
def test_cluster_copies_each_row_once_while_executors_are_killed(
    tmp_path: Path, package: Path, streams: Streams, names: tuple[str, ...]
) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    count = 4000
    for name in names:
        streams.filled(name, [{"n": n, "pad": "x" * (n % 60)} for n in range(count)])
    sent = dict.fromkeys(names, count)
    with standalone_cluster(tmp_path, package) as cluster:
        job = CopyJob(
            tmp_path,
            streams.root,
            environment(package),
            master=cluster.master,
            source={"streams": ",".join(names), "maxRowsPerBatch": "1500", "splitBytes": "30000"},
            conf={"spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1"},
        )
        killed, at_once = 0, 0
        try:
            job.wait_until_running()
            deadline = time.monotonic() + FINISH_TIMEOUT_S
            while not copies_are_complete(streams, sent):
                assert job.process.poll() is None, (tmp_path / "driver.log").read_text()[-3000:]
                assert time.monotonic() < deadline, f"not everything was copied; seed {seed}"
                time.sleep(rng.uniform(0.2, 1.0))
                executors = cluster.executors()
                at_once = max(at_once, len(executors))
                has_begun = streams.exists(f"copy-of-{names[0]}")
                if has_begun and executors and killed < 2:
                    victim: psutil.Process = rng.choice(executors)
                    victim.kill()
                    killed += 1
        finally:
            job.kill()
    assert at_once == 2, "both workers must have had an executor"
    assert killed >= 1, "the copy ended before an executor could be killed"
    judge_copies(streams, names, f"seed {seed}, {killed} executors killed")


@pytest.mark.timeout(600)
def test_speculative_and_slow_attempts_append_each_row_once(
    tmp_path: Path, package: Path, streams: Streams, names: tuple[str, ...]
) -> None:
    """Speculation needs a cluster: a slow task is started again on the other executor."""
    count = 600
    for name in names:
        streams.filled(name, [{"n": n} for n in range(count)])
    sent = dict.fromkeys(names, count)
    marks = tmp_path / "marks"
    marks.mkdir()
    with standalone_cluster(tmp_path, package) as cluster:
        job = CopyJob(
            tmp_path,
            streams.root,
            environment(package),
            master=cluster.master,
            marks=str(marks),
            source={"streams": ",".join(names), "maxRowsPerBatch": "600"},
            conf={
                "spark.executor.memory": "512m",
                "spark.driver.host": "127.0.0.1",
                "spark.speculation": "true",
                "spark.speculation.interval": "100ms",
                "spark.speculation.multiplier": "1.1",
                "spark.speculation.quantile": "0.5",
                "spark.speculation.minTaskRuntime": "100ms",
            },
        )
        try:
            job.wait_until_running()

            def complete() -> bool:
                assert job.process.poll() is None, (tmp_path / "driver.log").read_text()[-3000:]
                return copies_are_complete(streams, sent)

            waiting.wait_until(complete, what="everything is copied", limit_s=FINISH_TIMEOUT_S, every_s=0.5)
        finally:
            job.kill()
    assert (marks / "1-0-0").exists()
    assert (marks / "1-0-1").exists(), f"no speculative attempt was made: {sorted(one.name for one in marks.iterdir())}"
    judge_copies(streams, names, "one task was begun twice")


@pytest.mark.timeout(600)
def test_spark_connect_reads_writes_and_streams(
    tmp_path: Path, package: Path, streams: Streams, names: tuple[str, ...]
) -> None:
    source, copy, streamed = names
    streams.filled(source, [{"n": n} for n in range(500)])
    with connect_server(tmp_path, package) as address:
        job = {
            "address": address,
            "url": streams.root,
            "source": source,
            "copy": copy,
            "streamed": streamed,
            "progress": f"progress-of-{source}",
            "checkpoint": str(tmp_path / "checkpoint"),
        }
        subprocess.run(
            [sys.executable, "-m", "tests.spark.connect_job", json.dumps(job)],
            env=environment(package),
            cwd=tmp_path,
            check=True,
            timeout=300,
        )
    assert streams.raw(copy) == streams.raw(streamed) == streams.raw(source)
    state = streams.messages(f"progress-of-{source}")[-1]["value"]
    assert (state["status"], state["rows"], state["offsets"]) == ("stopped", 100, {source: streams.tail(source)})
