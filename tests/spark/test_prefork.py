"""Spark's Python processes are forks of one that has imported their modules, and end when they should."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headwater.spark import home
from tests.waiting import has_ended, wait_until

FORKED = "headwater.spark.prefork"
PRELOADED = ("pyspark_preloaded", "a_module_that_is_not_installed")
TELLS = """
import os, sys
print("pyspark_preloaded" in sys.modules, os.environ["GIVEN"], *sys.argv[1:], sys.stdin.read())
sys.exit(7)
"""
WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print(os.getpid(), flush=True)
time.sleep(600)
"""
STOPS_AFTER_FORK = """
import time
from headwater.operating_system import SYSTEM
SYSTEM.process_descriptor = lambda pid: time.sleep(600)  # The first call in the parent after the fork.
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "modules"
    directory.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")]))
    (directory / "pyspark_tells.py").write_text(TELLS)
    (directory / "pyspark_preloaded.py").write_text("")
    (directory / "pyspark_waits.py").write_text(WAITS)
    (directory / "pyspark_stops_after_fork.py").write_text(STOPS_AFTER_FORK)
    return directory


@pytest.fixture
def program(tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The program that Spark would start, with its own process to fork."""
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv(home.SOCKET_VARIABLE, "")
    monkeypatch.setattr(home, "_started", [])
    home.start_prefork(tmp_path, PRELOADED)
    yield os.environ["PYSPARK_PYTHON"]
    (process,) = home._started
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0
    assert not Path(os.environ[home.SOCKET_VARIABLE]).parent.exists()


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    given = os.environ | {"GIVEN": "by Spark"}
    return subprocess.run(
        [program, *words], env=given, input="input", capture_output=True, text=True, check=False, timeout=60
    )


def start_waiting(program: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    started = subprocess.Popen([program, "-m", "pyspark_waits"], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    with started.stdout:
        return started, psutil.Process(int(started.stdout.readline()))


def test_fork_has_the_modules_and_the_descriptors_arguments_and_environment_of_its_program(program: str) -> None:
    for _ in range(2):
        done = run(program, "-m", "pyspark_tells", "one", "two")
        assert (done.stdout, done.stderr, done.returncode) == ("True by Spark one two input\n", "", 7)


def test_other_programs_and_a_missing_process_start_python_itself(
    program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(program, "-c", "import sys; print(sys.prefix)").stdout == f"{sys.prefix}\n"
    with monkeypatch.context() as changed:
        changed.setenv(home.SOCKET_VARIABLE, str(tmp_path / "missing"))
        assert run(program, "-m", "pyspark_tells").stdout == "False by Spark input\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_fork_ends_with_its_program(program: str, number: signal.Signals) -> None:
    started, fork = start_waiting(program)
    started.send_signal(number)
    wait_until(lambda: has_ended(fork), what="the fork has ended")
    assert started.wait(30) == (9 if number == signal.SIGTERM else -number)


def test_signal_to_all_processes_ends_the_forks_only(program: str, modules: Path) -> None:
    (modules / "pyspark_waits.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    started, _ = start_waiting(program)
    (process,) = home._started
    process.terminate()
    started.terminate()
    assert started.wait(30) == 256 - signal.SIGTERM
    assert run(program, "-m", "pyspark_tells").stdout == "True by Spark input\n"


def test_program_ends_with_its_fork(program: str) -> None:
    started, fork = start_waiting(program)
    fork.kill()
    assert started.wait(30) == 256 - signal.SIGKILL


@pytest.mark.parametrize("preloaded", [PRELOADED, ("pyspark_stops_after_fork",)], ids=["later", "right after the fork"])
def test_forks_end_when_the_process_that_made_them_is_killed(
    preloaded: Sequence[str], tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv(home.SOCKET_VARIABLE, "")
    monkeypatch.setattr(home, "_started", [])
    home.start_prefork(tmp_path, preloaded)
    started, fork = start_waiting(os.environ["PYSPARK_PYTHON"])
    (process,) = home._started
    process.kill()
    process.communicate(timeout=60)
    shutil.rmtree(Path(os.environ[home.SOCKET_VARIABLE]).parent)
    assert started.wait(30) == 1
    wait_until(lambda: has_ended(fork), what="the fork has ended")


def test_forks_may_end_after_the_driver(program: str) -> None:
    started, fork = start_waiting(program)
    (process,) = home._started
    assert process.stdin is not None
    process.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert fork.is_running()
    fork.terminate()
    assert started.wait(30) == 9
    assert process.wait(30) == 0


def test_second_session_uses_the_same_process(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    home.start_prefork(tmp_path, PRELOADED)
    assert os.environ["PYSPARK_PYTHON"] == program
    assert len(home._started) == 1
    assert run(program, "-m", "pyspark_tells").stdout == "True by Spark input\n"


@pytest.mark.parametrize(("given", "is_replaced"), [(sys.executable, True), ("jupyter", False)])
def test_python_of_the_driver_is_replaced_if_it_is_this_one(
    program: str, given: str, is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", given)
    home.start_prefork(tmp_path, PRELOADED)
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == (program if is_replaced else given)


def test_configured_python_of_the_workers_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/python3")
    monkeypatch.setattr(home, "_started", [])
    home.start_prefork(tmp_path, PRELOADED)
    assert os.environ["PYSPARK_PYTHON"] == "/usr/bin/python3"
    assert not home._started


def test_workers_of_a_session_are_forks(spark: SparkSession) -> None:
    def command(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import psutil

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"command": [" ".join(psutil.Process().cmdline())]})

    (row,) = spark.range(1, numPartitions=1).mapInArrow(command, "command string").collect()
    assert FORKED in row.command


class Planned(DataSource):
    """A source whose one row is the command of the process in which Spark planned the query."""

    def schema(self) -> str:
        return "command string"

    def reader(self, schema: StructType) -> DataSourceReader:
        return PlannedReader()


class PlannedReader(DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        return [InputPartition(" ".join(psutil.Process().cmdline()))]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        yield (partition.value,)


def test_processes_that_plan_are_forks(spark: SparkSession) -> None:
    spark.dataSource.register(Planned)
    (row,) = spark.read.format("Planned").load().collect()
    assert FORKED in row.command
