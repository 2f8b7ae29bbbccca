"""The application of `tests.ai.app`, in a thread or as a process.

Only what starts it imports FastAPI, because every process of the tests imports the modules of all tests.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port
from tests.serving import server_environment
from tests.waiting import wait_until

WORDS = ["a", "durable", "stream", "remembers", "every", "token", "that", "was", "written", "to", "it"]

_REPOSITORY = Path(__file__).resolve().parents[2]


@contextmanager
def application_process(root: str, **variables: str) -> Iterator[str]:
    """Yields the address of the application; the process is killed at the end."""
    environment = server_environment(**variables)
    environment["PYTHONPATH"] += f":{_REPOSITORY}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ai.app", root], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        yield line.removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def serving(root: str, read_root: str | None = None) -> Iterator[str]:
    """The application in a thread; yields its address."""
    import uvicorn

    from tests.ai.app import application

    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(application(root, read_root), host="127.0.0.1", port=port, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until_answers(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def wait_until_answers(port: int) -> None:
    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True

    wait_until(answers, what="the application listens")
