"""Logs: one record is one line, times are UTC, levels follow the filter."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import httpx
import pytest

from headwater.telemetry import LOG_BACKLOG_BYTES, JsonLines, LogWriter, TextLines, request_id
from tests.serving import server_environment
from tests.waiting import wait_until


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("headwater.test").makeRecord(
        "headwater.test", logging.INFO, __file__, 1, message, arguments, None, extra=extra
    )
    made.created = 1_700_000_000.0625
    return made


def printed(filter_text: str, style: str, statements: str) -> list[str]:
    """What a fresh process writes to stderr: logging is global, so each case gets its own."""
    program = (
        "import logging\n"
        "from headwater.config import LogFilter\n"
        "from headwater.telemetry import set_up_logging\n"
        f"set_up_logging(LogFilter.parse({filter_text!r}), {style!r})\n{statements}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=server_environment(), capture_output=True, timeout=60, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_text_line_has_time_level_logger_message_and_fields() -> None:
    line = TextLines().format(record("took %s", "long", stream="a/b", bytes=3))
    assert line == "2023-11-14T22:13:20.062Z INFO  headwater.test took long stream=a/b bytes=3"


def test_json_line_has_the_fields_of_a_text_line_as_keys() -> None:
    entry: Mapping[str, object] = json.loads(JsonLines().format(record("took %s", "long", stream="a/b", raw=b"\xff")))
    assert entry == {
        "time": "2023-11-14T22:13:20.062Z",
        "level": "info",
        "logger": "headwater.test",
        "message": "took long",
        "stream": "a/b",
        "raw": "\\xff",
    }


def test_a_name_cannot_forge_a_line() -> None:
    evil = "x\n2023-11-14T22:13:20.062Z ERROR headwater.test all is lost\r\x1b[31m\u2028"
    for formatter in (TextLines(), JsonLines()):
        line = formatter.format(record("created %s", evil, stream=evil))
        assert len(line.splitlines()) == 1
        assert "\x1b" not in line


def test_a_field_cannot_replace_the_record_itself() -> None:
    entry = json.loads(JsonLines().format(record("real", time="fake", level="fake", logger="fake")))
    assert entry["logger"] == "headwater.test"
    assert entry["level"] == "info"


def test_a_traceback_follows_its_line() -> None:
    statements = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.getLogger('headwater.x').exception('bug')"
    text = printed("info", "text", statements)
    assert text[0].endswith("ERROR headwater.x bug")
    assert text[-1] == "ZeroDivisionError: division by zero"
    lines = printed("info", "json", statements)
    assert len(lines) == 1
    assert json.loads(lines[0])["traceback"].endswith("ZeroDivisionError: division by zero")


def test_levels_follow_the_filter() -> None:
    statements = (
        "for name in ('headwater.http', 'headwater.engine', 'other'):\n"
        "    logging.getLogger(name).debug('d')\n"
        "    logging.getLogger(name).warning('w')\n"
    )

    def seen(filter_text: str) -> list[str]:
        return [" ".join(line.split()[1:]) for line in printed(filter_text, "text", statements)]

    assert seen("info") == ["WARNING headwater.http w", "WARNING headwater.engine w", "WARNING other w"]
    assert seen("error,headwater.http=debug") == ["DEBUG headwater.http d", "WARNING headwater.http w"]
    assert seen("off") == []


def test_chatty_libraries_are_quiet_unless_named() -> None:
    statements = "logging.getLogger('httpx').info('HTTP Request')"
    assert printed("debug", "text", statements) == []
    assert len(printed("info,httpx=info", "text", statements)) == 1


def test_request_ids_are_unique_and_short() -> None:
    ids = [request_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]+", made) for made in ids)


def read_all(descriptor: int) -> list[str]:
    """The lines in a pipe whose other end is closed."""
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read().decode().splitlines()


def test_logging_does_not_wait_for_a_reader_that_has_stopped_reading() -> None:
    reading, writing = os.pipe()
    handler = LogWriter(writing)
    handler.setFormatter(logging.Formatter("%(message)s"))
    count = 2 * LOG_BACKLOG_BYTES // 1000
    for number in range(count):
        handler.handle(record("%s", f"{number:06} ".ljust(999, "x")))
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.extend(read_all(reading)))
    reader.start()
    wait_until(lambda: handler.is_idle, what="the backlog to be written")
    handler.handle(record("the last"))
    os.close(writing)
    reader.join()
    numbers = [int(line[:6]) for line in found[:-2]]
    assert numbers == sorted(numbers), "in order"
    # If the thread starts late, the last few lines that fit into the pipe leave space for lines after those dropped.
    assert numbers[: LOG_BACKLOG_BYTES // 1000] == list(range(LOG_BACKLOG_BYTES // 1000)), "without a gap"
    assert LOG_BACKLOG_BYTES // 1000 < len(numbers) < count
    assert found[-2:] == [f"{count - len(numbers)} lines were dropped because stderr was not read", "the last"]


def test_logging_continues_without_a_reader() -> None:
    reading, writing = os.pipe()
    handler = LogWriter(writing)
    for _ in range(100):
        handler.handle(record("%s", "x" * 1000))
    os.close(reading)
    wait_until(lambda: handler.is_idle, what="the backlog to be dropped")
    handler.handle(record("nobody reads this"))
    os.close(writing)


def test_the_last_lines_are_written_at_the_end_of_the_program() -> None:
    """More than a pipe takes at once, read only when all of it has been logged."""
    statements = "for number in range(5_000): logging.getLogger('x').warning('%s', f'{number:06}' + 'x' * 90)"
    lines = printed("info", "text", statements)
    assert [int(line.split()[3][:6]) for line in lines] == list(range(5_000))


def test_lines_stay_in_order_when_the_program_ends_while_its_reader_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_in_the_thread(descriptor: int, data: bytes) -> int:
        if threading.current_thread().name == "log-writer":
            time.sleep(0.01)
        return write(descriptor, data)

    write = os.write
    monkeypatch.setattr(os, "write", slow_in_the_thread)
    reading, writing = os.pipe()
    handler = LogWriter(writing)
    for number in range(120):
        handler.handle(record("%s", f"{number:06} ".ljust(999, "x")))
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.extend(read_all(reading)))
    assert handler.lock is not None
    with handler.lock:
        reader.start()
        handler.flush()
    wait_until(lambda: handler.is_idle, what="the backlog to be written")
    os.close(writing)
    reader.join()
    assert [line[:6] for line in found] == [f"{number:06}" for number in range(120)]


def test_a_server_answers_while_nobody_reads_its_log() -> None:
    """Each request is a line in the log, and the lines are several times as much as a pipe takes."""
    environment = server_environment(DS_STORAGE__MODE="memory", DS_LOG__RUST_LOG="debug")
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            assert process.stderr is not None
            started = next(line for line in process.stderr if b"listening on" in line)
            url = started.decode().split("listening on ")[1].split()[0]
            with httpx.Client(base_url=url) as client:
                for number in range(500):
                    assert client.get(f"/v1/stream/{number}-{'x' * 400}").status_code == 404
            process.terminate()
            lines = process.stderr.read().decode().splitlines()
            assert sum("x" * 400 in line for line in lines) >= 500
        finally:
            process.kill()
