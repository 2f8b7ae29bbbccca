"""A stack for a test, started with `headwater up --detach` and stopped with `headwater down`.

Invariant: after the `with` block no process of the stack is running; one that is fails the test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from headwater.stack.processes import ProcessIdentity, identity_of
from tests.ports import free_port
from tests.serving import server_environment
from tests.waiting import wait_until

COMMAND_TIMEOUT_SECS = 450.0  # longer than any start timeout that a test sets


@dataclass(slots=True)
class Stack:
    directory: Path
    environment: dict[str, str]
    ports: dict[str, int]
    seen: set[ProcessIdentity] = field(default_factory=set)
    said: str = ""
    """What the last start printed for people."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['proxy']}"

    @property
    def data(self) -> Path:
        return self.directory / "data" / "stack"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "headwater", *arguments]

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.directory,
            env={**self.environment, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_SECS,
        )

    def up(self, *arguments: str, **env: str) -> None:
        done = self.run("up", "--detach", *arguments, **env)
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"
        self.said = done.stderr
        self.note()

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.run("status", "--json").stdout)
        return status

    def note(self) -> dict[str, Any]:
        """Record every process, to check later that it has exited."""
        status: dict[str, Any] = json.loads((self.data / "run" / "state.json").read_bytes())
        for one in (status, *status["parts"]):
            if one["pid"]:
                self.seen.add(ProcessIdentity(one["pid"], one["started"]))
        return status

    def part(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(part for part in self.note()["parts"] if part["name"] == name)
        return found

    def kill(self, name: str) -> int:
        """kill -9 one service; return its process id."""
        pid: int = self.part(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_until_up_again(self, name: str, but_not: int, timeout_s: float = 300.0) -> None:
        wait_until(
            lambda: self.part(name),
            lambda part: part["state"] == "up" and part["pid"] != but_not,
            what=f"{name} is up again",
            limit_s=timeout_s,
        )

    def token(self, *arguments: str) -> str:
        done = self.run("token", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def client(self, token: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"})

    def logs(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(self.data.glob("logs/*.log")))

    def left_over(self) -> list[ProcessIdentity]:
        return [identity for identity in self.seen if identity.is_alive]


@contextmanager
def stack(directory: Path, **env: str) -> Iterator[Stack]:
    """Prepare a stack on free ports; stop it at the end of the block."""
    ports = {name: free_port() for name in ("server", "proxy", "postgres", "adminer", "shapes", "sync")}
    environment = server_environment(
        **{
            "DS_SERVER__PORT": str(ports["server"]),
            "DS_PROXY__PORT": str(ports["proxy"]),
            "DS_PROXY__THREADS": "1",
            "DS_STACK__POSTGRES_PORT": str(ports["postgres"]),
            "DS_STACK__ADMINER_PORT": str(ports["adminer"]),
            "DS_STACK__SYNC_PORT": str(ports["sync"]),
            "DS_SHAPES__PORT": str(ports["shapes"]),
            **env,
        }
    )
    made = Stack(directory, environment, ports)
    try:
        yield made
    finally:
        if (made.data / "run" / "state.json").exists():
            made.note()
        done = made.run("down")
        left = made.left_over()
        for identity in left:
            identity.stop(signal.SIGKILL, 5)
        assert done.returncode == 0, done.stderr
        assert not left, f"still ran after `headwater down`: {left}"


def identity(pid: int) -> ProcessIdentity:
    return identity_of(pid)
