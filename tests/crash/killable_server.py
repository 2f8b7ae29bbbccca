"""A server that tests start and kill through a launcher process, always on the same port and directory."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from tests.crash.workload import Violation
from tests.serving import server_environment

START_TIMEOUT_S = 120.0
REPOSITORY = Path(__file__).resolve().parents[2]


class KillableServer:
    def __init__(self, home: Path, mode: str, port: int, fault: str | None, workers: int = 1) -> None:
        self._home = home
        self._mode = mode
        self._fault = fault
        self._workers = workers
        self._launcher: asyncio.subprocess.Process | None = None
        self.port = port
        self.pid = 0
        self.data = home / "data"
        self.log = home / "server.log"

    async def open(self) -> None:
        settings = {
            "CRASH_PORT": str(self.port),
            "DS_STORAGE__MODE": self._mode,
            "DS_STORAGE__DATA_DIR": str(self.data),
            "DS_STORAGE__SEGMENT_BYTES": "65536",
            "DS_STORAGE__HOT_TAIL_BYTES": "131072",
            "DS_STORAGE__ACID_SHARD_COUNT": "4",
            "DS_SERVER__LONG_POLL_TIMEOUT_SECS": "1",
            "DS_SERVER__SSE_RECONNECT_INTERVAL_SECS": "1",
            "DS_SERVER__DRAIN_TIMEOUT_SECS": "2",
            "DS_EXPIRY__SWEEP_INTERVAL_SECS": "0.2",
            "DS_SERVER__WORKERS": str(self._workers),
            "DS_SERVER__WORKER_TIMEOUT_SECS": "1",
        }
        environment = server_environment(**settings)
        environment["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
        arguments = [str(self.log), *([self._fault] if self._fault else [])]
        self._launcher = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.crash.launcher",
            *arguments,
            cwd=self._home,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def close(self) -> None:
        if self._launcher is not None:
            assert self._launcher.stdin is not None
            self._launcher.stdin.close()
            await self._launcher.wait()

    async def start(self, *, new_interpreter: bool = False, clock_ahead_s: float = 0.0) -> None:
        answer = await self._send("exec" if new_interpreter else f"start {clock_ahead_s}" if clock_ahead_s else "start")
        assert answer.startswith("started"), answer
        self.pid = int(answer.split()[1])

    async def kill(self) -> None:
        answer = await self._send("kill")
        if answer != "killed":
            raise Violation(f"the server {answer} before it was killed; its log ends:\n{self.log_tail()}")

    async def stop(self) -> None:
        answer = await self._send("stop")
        if answer != "ended 0":
            raise Violation(f"the server {answer} on SIGTERM; its log ends:\n{self.log_tail()}")

    async def wait_until_listening(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                state = await self._send("status")
                if state != "running" or time.monotonic() > until:
                    raise Violation(f"the server does not listen ({state}); its log ends:\n{self.log_tail()}") from None
                await asyncio.sleep(0.003)
            else:
                writer.transport.abort()
                return

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    async def _send(self, command: str) -> str:
        assert self._launcher is not None
        assert self._launcher.stdin is not None
        assert self._launcher.stdout is not None
        self._launcher.stdin.write(f"{command}\n".encode())
        await self._launcher.stdin.drain()
        return (await self._launcher.stdout.readline()).decode().strip()
