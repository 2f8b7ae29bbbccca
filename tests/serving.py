"""A real server for a test: `serve()` starts `headwater serve` as a process and ends it again.

Invariant: when the `with` block is left, the child is gone; one that does not end on SIGTERM fails the test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from tests.forking import ForkedProcess, forking_server
from tests.waiting import wait_until

START_TIMEOUT_SECS = 120.0
STOP_TIMEOUT_SECS = 90.0
TIME_HAS_PASSED = "time has passed: move {}."

_REPOSITORY = Path(__file__).resolve().parent.parent
_LISTENING = re.compile(r"listening on (https?://[^\s\"]+)")


default_workers: list[str] = []
"""With `--workers N`: how many workers the servers of all tests have that do not say it themselves."""

Process: TypeAlias = subprocess.Popen[bytes] | ForkedProcess


class Server:
    """One running `headwater serve`. Base address in `url`, without a trailing slash."""

    def __init__(self, process: Process, directory: Path) -> None:
        self.process = process
        self.directory = directory
        self.url = ""
        self._log: list[str] = []
        self._is_asked = False
        self._moves = 0
        self.moved_s = 0.0
        """How far the clock of a server with `moving_time` is ahead of ours."""
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read_log, name="server-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def stream_url(self, name: str) -> str:
        return f"{self.url}/v1/stream/{name}"

    def log(self) -> str:
        """Everything the server has written to stderr so far."""
        return "".join(self._log)

    def wait_for_log(self, text: str) -> None:
        """Until the server has written this to stderr."""
        wait_until(lambda: text in self.log(), what=f"{text!r} in the log of the server")

    def pass_time(self, seconds: float) -> None:
        """Move the clock of a server with `moving_time` forward; timers that are due then have run on return."""
        assert self.process.stdin is not None, "only a server with moving_time has a clock that moves"
        self.process.stdin.write(f"{seconds}\n".encode())
        self.process.stdin.flush()
        self._moves += 1
        self.moved_s += seconds
        self.wait_for_log(TIME_HAS_PASSED.format(self._moves))

    def kill(self) -> None:
        """End it as a crash would: SIGKILL, nothing flushed."""
        self.process.kill()
        self.process.wait(timeout=STOP_TIMEOUT_SECS)
        self._reader.join(timeout=STOP_TIMEOUT_SECS)

    def ask_to_stop(self) -> None:
        """Ask it to drain (SIGTERM), and do not wait. Only once: a second signal could end it while it exits."""
        if not self._is_asked and self.process.poll() is None:
            self._is_asked = True
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Ask it to drain and return its exit code."""
        self.ask_to_stop()
        try:
            code = self.process.wait(timeout=STOP_TIMEOUT_SECS)
        except subprocess.TimeoutExpired:
            self.kill()
            message = f"the server did not end within {STOP_TIMEOUT_SECS} s of SIGTERM; its log:\n{self.log()}"
            raise AssertionError(message) from None
        self._reader.join(timeout=STOP_TIMEOUT_SECS)
        return code

    def wait_until_listening(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECS
        while not self._listening.wait(timeout=0.05):
            code = self.process.poll()
            if code is not None:
                self._reader.join(timeout=STOP_TIMEOUT_SECS)
                raise AssertionError(f"the server ended with code {code} before listening; its log:\n{self.log()}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(
                    f"no 'listening on' line within {START_TIMEOUT_SECS} s; the server's log:\n{self.log()}"
                )

    def _read_log(self) -> None:
        stream = self.process.stderr
        assert stream is not None
        with stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace")
                self._log.append(line)
                found = None if self._listening.is_set() else _LISTENING.search(line)
                if found is not None:
                    self.url = found[1].rstrip("/")
                    self._listening.set()


def server_environment(**settings: str) -> dict[str, str]:
    """The child's environment: ours without DS_… and RUST_LOG, so that only `settings` configure it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DS_") and key != "RUST_LOG"}
    # A checkout that is not installed must still be the code under test.
    paths = [str(_REPOSITORY / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment | settings


@contextmanager
def serve(
    *,
    arguments: tuple[str, ...] = (),
    directory: Path | None = None,
    port: int = 0,
    program: tuple[str, ...] = ("headwater",),
    command: tuple[str, ...] = (),
    moving_time: bool = False,
    **env: str,
) -> Iterator[Server]:
    """Start a server with the given DS_… variables; wait until it listens; stop it on exit.

    `directory` is its working directory (a temporary one by default): pass the same one twice to start a
    second server on the data of the first. If that must have the port of the first, both get one of `tests.ports`: the
    system could give another one away in between. `program` is the module that runs it, with arguments, for tests that
    change or measure the server; `command` is what executes it, like `prlimit`. With `moving_time` the test can
    move the clock of the server (`tests/moving_time.py`).
    """
    if default_workers and program == ("headwater",) and not moving_time:
        env.setdefault("DS_SERVER__WORKERS", default_workers[0])
    with tempfile.TemporaryDirectory(prefix="headwater-test-") as temporary:
        cwd = directory or Path(temporary)
        environment = server_environment(**env)
        if moving_time:
            program = ("tests.moving_time",)
        if program[0] != "headwater":
            environment["PYTHONPATH"] += os.pathsep + str(_REPOSITORY)
        given = ("serve", "--port", str(port), *arguments)
        process: Process
        if command:
            process = subprocess.Popen(
                [*command, sys.executable, "-m", *program, *given],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        else:
            process = forking_server().start(program, given, cwd, environment, has_stdin=moving_time)
        server = Server(process, cwd)
        try:
            server.wait_until_listening()
            yield server
        except BaseException:
            if process.poll() is None:
                server.kill()
            raise
        else:
            server.stop()
        finally:
            if process.stdin is not None:
                process.stdin.close()
