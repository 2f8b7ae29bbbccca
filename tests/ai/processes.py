"""The application as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.serving import server_environment

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
