"""An example as its user starts it: `examples/run.py` as a process, with the ids of its parts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.examples.loading import EXAMPLES
from tests.ports import free_port
from tests.serving import server_environment
from tests.waiting import wait_until

_PART = re.compile(r"^  (\w+): process (\d+)(?: on port (\d+))?$", re.MULTILINE)


class RunningExample:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self._said: list[str] = []
        self.url = f"http://localhost:{port}"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def said(self) -> str:
        return "".join(self._said)

    def part(self, name: str) -> tuple[int, int]:
        """The process id and the port of a part, as it was started last."""
        found = [(int(pid), int(port or 0)) for part, pid, port in _PART.findall(self.said) if part == name]
        return found[-1]

    @property
    def streams(self) -> str:
        return f"http://127.0.0.1:{self.part('server')[1]}/v1/stream"

    def kill(self, name: str) -> None:
        """End a part as a crash would; returns once it was started again."""
        pid = self.part(name)[0]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.part(name)[0] != pid, what=f"a new {name}")

    def wait_until_ready(self) -> None:
        wait_until(lambda: "Ctrl-C stops it" in self.said or self._process.poll() is not None, what="the example")
        assert self._process.poll() is None, self.said

    def interrupt(self) -> int:
        """Ctrl-C; its exit code."""
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(60)
        self._reader.join(10)
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                self._said.append(line)


@contextmanager
def running_example(name: str, data: Path, **environment: str) -> Iterator[RunningExample]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "run.py"), name, "--port", str(port), "--data", str(data)],
        env=server_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = RunningExample(process, port)
    try:
        running.wait_until_ready()
        yield running
    finally:
        if process.poll() is None:
            running.interrupt()
