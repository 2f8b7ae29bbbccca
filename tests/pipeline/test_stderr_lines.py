"""Lines of Spark's processes in our log: all have timestamps, and tracebacks of closed sockets are dropped."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from headwater.pipeline.stderr_lines import StderrLines

DAEMON = "/site-packages/pyspark/python/lib/pyspark.zip/pyspark/daemon.py"
CLOSED = f"""Traceback (most recent call last):
  File "{DAEMON}", line 264, in manager
  File "{DAEMON}", line 95, in worker
BrokenPipeError: [Errno 32] Broken pipe""".splitlines()
ENDED = """Traceback (most recent call last):
  File "/usr/lib/python3.11/socketserver.py", line 317, in _handle_request_noblock
    self.process_request(request, client_address)
  File "/site-packages/pyspark/accumulators.py", line 304, in accum_updates
    num_updates = read_int(self.rfile)
  File "/site-packages/pyspark/serializers.py", line 604, in read_int
    raise EOFError
EOFError""".splitlines()
FLUSHED = ["PySpark daemon failed to flush the output to the worker process:", *CLOSED]
SERVED = ["-" * 40, "Exception occurred during processing of request from ('127.0.0.1', 4711)", *ENDED, "-" * 40]
REAL = f"""Traceback (most recent call last):
  File "{DAEMON}", line 264, in manager
  File "/app/job.py", line 3, in rows
    raise ValueError("x")
ValueError: x""".splitlines()
ELSEWHERE = """Traceback (most recent call last):
  File "/app/job.py", line 3, in rows
    connection.sendall(body)
BrokenPipeError: [Errno 32] Broken pipe""".splitlines()
OURS = "2026-11-16 18:57:13,001 INFO headwater.pipeline: session-events: running"
LOG4J = "26/11/16 18:57:13 ERROR MicroBatchExecution: Query failed"
TIMED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|ERROR) spark: (.*)")


def fed(*lines: str) -> list[str]:
    tidy = StderrLines()
    return [line for given in lines for line in tidy.feed(given)] + tidy.flush()


@pytest.mark.parametrize("block", [CLOSED, ENDED, FLUSHED, SERVED, [*SERVED, *SERVED], [*CLOSED, *CLOSED]])
def test_socket_closed_by_spark_is_not_reported(block: list[str]) -> None:
    assert fed(OURS, *block, LOG4J) == [OURS, LOG4J]


def test_tracebacks_of_two_workers_may_be_interleaved() -> None:
    mixed = [line for pair in zip(CLOSED, CLOSED, strict=True) for line in pair]
    assert fed(*mixed, OURS) == [OURS]
    assert fed(CLOSED[0], OURS, *CLOSED[1:]) == [OURS]


@pytest.mark.parametrize("block", [REAL, ELSEWHERE])
def test_any_other_traceback_is_logged_with_its_time(block: list[str]) -> None:
    lines = [TIMED.fullmatch(line) for line in fed(*block)]
    assert [found[2] for found in lines if found] == block
    assert all(found and found[1] == "ERROR" for found in lines)


def test_lines_without_a_timestamp_get_one_and_others_are_unchanged() -> None:
    banner, trace = "Picked up JAVA_TOOL_OPTIONS: -Xmx1g", "\tat org.apache.spark.Some(Some.scala:1)"
    lines = fed(OURS, banner, LOG4J, trace, "", OURS)
    assert (lines[0], lines[2], lines[4]) == (OURS, LOG4J, OURS)
    assert [TIMED.fullmatch(lines[place])[2] for place in (1, 3)] == [banner, trace]  # type: ignore[index]


def test_stderr_of_a_process_and_its_children_is_filtered() -> None:
    script = """
import subprocess, sys
from headwater.pipeline.stderr_lines import tidy_stderr
with tidy_stderr():
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1])", sys.argv[1]])
    print("own", file=sys.stderr)
    print("Traceback (most recent call last):", file=sys.stderr)
print("afterwards", file=sys.stderr)
"""
    child = "\n".join([*CLOSED, "kept", ""])
    done = subprocess.run([sys.executable, "-c", script, child], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()
    assert [line.partition("spark: ")[2] for line in lines[:3]] == ["kept", "own", "Traceback (most recent call last):"]
    assert lines[3:] == ["afterwards"]


def test_banner_of_spark_is_dropped() -> None:
    lines = StderrLines()
    for line in (
        "WARNING: Using incubator modules: jdk.incubator.vector",
        "Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties",
        'Setting default log level to "WARN".',
        "To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).",
        "26/11/17 23:39:21 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform...",
        'Setting Spark log level to "FATAL".',
    ):
        assert lines.feed(line) == [], line
    assert lines.feed("26/11/17 23:39:21 WARN Something: else") != []
