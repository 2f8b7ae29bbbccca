"""The commands in the documentation are run as printed, and must say what the page says they say."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.markdown import PAGES, REPOSITORY, Example, examples
from tests.serving import Server, serve, server_environment

COMMAND_TIMEOUT_SECS = 30.0
PRINTED_ADDRESS = "localhost:4437"

_PAGES_WITH_COMMANDS = [page for page in PAGES if page.exists() and examples(page)]


def as_run(command: str, server: Server) -> str:
    """The printed command with this run's port, and our interpreter in place of the environment's script."""
    command = command.replace(PRINTED_ADDRESS, f"localhost:{server.port}")
    return command.replace(".venv/bin/headwater", f"{sys.executable} -m headwater")


def comparable(line: str, server: Server) -> str:
    line = line.replace(f"localhost:{server.port}", PRINTED_ADDRESS)
    name, colon, value = line.partition(": ")
    # Header names have no case.
    return f"{name.lower()}{colon}{value}" if re.fullmatch(r"[A-Za-z-]+", name) else line


def missing_line(promised: Sequence[str], printed: Sequence[str]) -> str | None:
    """The first promised line that does not follow, in order; `…` in a promise stands for anything."""
    rest = iter(printed)
    for line in promised:
        pattern = re.compile(".*".join(re.escape(piece) for piece in line.split("…")))
        if not any(pattern.fullmatch(candidate) for candidate in rest):
            return line
    return None


def run_example(example: Example, server: Server) -> tuple[list[str], str | None]:
    """Run a block. One that would go on for ever (`curl -N`) is ended once it has said what was promised."""
    script = "set -e\n" + "\n".join(as_run(command, server) for command in example.commands)
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=REPOSITORY,
        env=server_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    endless = any("curl -N" in command for command in example.commands)
    promised = [comparable(line, server) for line in example.output]
    printed: list[str] = []
    missing: str | None = None
    deadline = time.monotonic() + COMMAND_TIMEOUT_SECS
    assert process.stdout is not None
    with process.stdout:
        for raw in process.stdout:
            printed.append(comparable(raw.decode("utf-8").rstrip("\r\n"), server))
            missing = missing_line(promised, printed)
            if (endless and missing is None) or time.monotonic() > deadline:
                break
    if endless:
        process.terminate()
    code = process.wait(timeout=COMMAND_TIMEOUT_SECS)
    assert endless or code == 0, f"exit code {code} of {example.commands}"
    return printed, missing_line(promised, printed)


@pytest.mark.parametrize("page", _PAGES_WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_as_printed(page: Path, tmp_path: Path) -> None:
    # The same start as `make run`, but for the port and the place of its data.
    with serve(arguments=("--profile", "dev"), directory=REPOSITORY, DS_STORAGE__DATA_DIR=str(tmp_path)) as server:
        for example in examples(page):
            printed, missing = run_example(example, server)
            where = f"{page.name}, line {example.line}: {example.commands[0]}"
            assert missing is None, f"{where}\npromised: {missing}\nprinted:\n" + "\n".join(printed)


def test_the_readme_shows_the_whole_round() -> None:
    shown = "\n".join(command for example in examples(REPOSITORY / "README.md") for command in example.commands)
    for part in (
        "-X PUT",
        "-X POST",
        "offset=-1",
        "live=sse",
        "Stream-Closed: true",
        "-X DELETE",
        "application/json",
    ):
        assert part in shown
