"""Starts servers fast: one process imports everything once, and every server is a fork of it.

Importing takes longer than most tests. `tests/cli` and whatever gives `serve` a command start an interpreter as a user
does. Invariant: when the process of the tests ends, the forks end as well.

    python -m tests.forking SOCKET

Each request on the socket is a JSON object with the descriptors for stdin and stderr. It is answered with the id of the
new process; when a process ends, its exit code follows.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

REPOSITORY = Path(__file__).resolve().parent.parent
MESSAGE_BYTES = 1024 * 1024
START_S = 180
"""Time for the first process: in a fresh clone nothing is compiled yet, and everything is imported once."""


class ForkedProcess:
    """A process of the forking server, as `subprocess.Popen` would show it."""

    def __init__(self, server: ForkingServer, pid: int, stdin: IO[bytes] | None, stderr: IO[bytes]) -> None:
        self._server = server
        self.pid = pid
        self.stdin = stdin
        self.stderr = stderr

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._server.ended.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        with self._server.changed:
            if not self._server.changed.wait_for(lambda: self.pid in self._server.ended, timeout):
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        return self._server.ended[self.pid]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkingServer:
    """The client's side: one for the process of the tests, started when it is first needed."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.ended: dict[int, int] = {}
        """Exit codes by process id, negative for signals."""
        self.changed = threading.Condition()
        self._started: list[int] = []
        self._asking = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forking", str(theirs.fileno())],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        threading.Thread(target=self._listen, name="forking-server", daemon=True).start()
        atexit.register(self._close)

    def start(
        self, program: Sequence[str], arguments: Sequence[str], cwd: Path, env: dict[str, str], *, has_stdin: bool
    ) -> ForkedProcess:
        request = {"program": [*program, *arguments], "cwd": str(cwd), "env": env}
        log, their_log = os.pipe()
        their_input, ours = os.pipe() if has_stdin else (os.open(os.devnull, os.O_RDONLY), -1)
        try:
            with self._asking, self.changed:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [their_input, their_log])
                assert self.changed.wait_for(lambda: bool(self._started), START_S), "the forking server does not answer"
                pid = self._started.pop()
        finally:
            os.close(their_log)
            os.close(their_input)
        return ForkedProcess(self, pid, os.fdopen(ours, "wb") if has_stdin else None, os.fdopen(log, "rb"))

    def _listen(self) -> None:
        while message := self._socket.recv(MESSAGE_BYTES):
            report = json.loads(message)
            with self.changed:
                if "code" in report:
                    self.ended[report["pid"]] = report["code"]
                else:
                    self.ended.pop(report["pid"], None)
                    self._started.append(report["pid"])
                self.changed.notify_all()

    def _close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._socket.close()


@functools.cache
def forking_server() -> ForkingServer:
    from tests.serving import server_environment

    environment = server_environment()
    environment["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
    return ForkingServer(environment)


# -- the process that forks


def run_child(request: dict[str, Any], descriptors: list[int]) -> int:
    """The server, from its arguments to its exit code."""
    os.dup2(descriptors[0], 0)
    os.dup2(descriptors[1], 2)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    module, *arguments = request["program"]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork(request: dict[str, Any], descriptors: list[int], connection: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connection.close()
        code = run_child(request, descriptors)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stderr.flush()
    finally:
        os._exit(code)


def forward(connection: socket.socket) -> None:
    """Fork on request and report what has ended, until the other side is closed."""
    wakes, wake = socket.socketpair()
    for one in (wakes, wake):
        one.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    try:
        while True:
            readable, _, _ = select.select([connection, wakes], [], [])
            if wakes in readable:
                wakes.recv(65_536)
            for pid in tuple(running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    running.discard(pid)
                    connection.send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())
            if connection in readable:
                message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
                if not message:
                    return
                pid = fork(cast(dict[str, Any], json.loads(message)), descriptors, connection)
                running.add(pid)
                for descriptor in descriptors:
                    os.close(descriptor)
                connection.send(json.dumps({"pid": pid}).encode())
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    import headwater.cli.serve
    import headwater.cluster.start  # noqa: F401 - imported once, for all forks

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        forward(connection)


if __name__ == "__main__":
    main()
