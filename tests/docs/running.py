"""Run the code blocks of a page (`bash`, `python`, `ts`, `js`) as printed against a real server.

Invariant: a block that ends must succeed, an endless one is stopped when it has printed the expected output, and no
process that a block started outlives it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.markdown import REPOSITORY, Example
from tests.serving import Server, server_environment

BLOCK_TIMEOUT_SECS = 240.0
PRINTED_ADDRESS = "localhost:4437"
NODE_MODULES = REPOSITORY / "tests" / "npm" / "node_modules"

_ENDLESS = ("curl -N", "headwater tail ")


@dataclass(frozen=True, slots=True)
class Printed:
    """The output of a block, as lines that can be compared with a page."""

    stdout: tuple[str, ...]
    stderr: str
    missing: str | None
    """The first expected line that is missing."""


class PageRun:
    """A server and a directory, for the blocks of one page in their order."""

    def __init__(self, server: Server, directory: Path) -> None:
        self.server = server
        self.directory = directory
        commands = directory / "commands"
        commands.mkdir()
        script = commands / "headwater"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headwater "$@"\n')
        script.chmod(0o755)
        named = {
            "DS_URL": f"http://localhost:{server.port}",
            "DATA_DIR": str(directory / "data"),
            "PYTHON": sys.executable,
        }
        self.environment = server_environment(**named)
        self.environment["PATH"] = f"{commands}{os.pathsep}{self.environment['PATH']}"

    def bash(self, example: Example) -> Printed:
        lines = [self.as_run(line) for line in example.commands]
        endless = any(mark in line for line in lines for mark in _ENDLESS)
        script = "set -eo pipefail\n" + "\n".join(lines)
        return self._run(["bash", "-c", script], example, cwd=REPOSITORY, endless=endless)

    def python(self, example: Example) -> Printed:
        file = self.directory / f"line_{example.line}.py"
        file.write_text(self.as_run(example.block.text), encoding="utf-8")
        return self._run([sys.executable, str(file)], example, cwd=self.directory)

    def javascript(self, example: Example, compiled: Mapping[int, Path]) -> Printed:
        return self._run([node(), str(compiled[example.line])], example, cwd=self.directory)

    def compile_scripts(self, found: Sequence[Example]) -> dict[int, Path]:
        """Write the `ts` and `js` blocks of a page to files that Node runs; TypeScript is compiled."""
        if not found:
            return {}
        if not (NODE_MODULES / "typescript").is_dir():
            pytest.fail("TypeScript in the pages is checked by its compiler; `make setup` installs it")
        place = self.directory / "scripts"
        place.mkdir()
        (place / "node_modules").symlink_to(NODE_MODULES)
        (place / "package.json").write_text('{"type": "module"}')
        for example in found:
            name = f"line_{example.line}.{example.block.language}"
            (place / name).write_text(self.as_run(example.block.text), encoding="utf-8")
        typed = [str(place / f"line_{e.line}.ts") for e in found if e.block.language == "ts"]
        if typed:
            options = "--strict --target es2022 --module nodenext --lib es2023,dom,dom.iterable,dom.asynciterable"
            done = subprocess.run(
                [node(), str(NODE_MODULES / ".bin" / "tsc"), *options.split(), "--skipLibCheck", *typed],
                cwd=place,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stdout
        return {example.line: place / f"line_{example.line}.js" for example in found}

    def as_run(self, text: str) -> str:
        """The text of a page with this run's port, and our interpreter instead of the environment's script."""
        return text.replace(PRINTED_ADDRESS, f"localhost:{self.server.port}").replace(
            ".venv/bin/headwater", "headwater"
        )

    def _comparable(self, line: str) -> str:
        line = line.rstrip("\r\n").replace(f"localhost:{self.server.port}", PRINTED_ADDRESS)
        name, colon, value = line.partition(": ")
        # Header names are case-insensitive.
        return f"{name.lower()}{colon}{value}" if re.fullmatch(r"[A-Za-z-]+", name) else line

    def _run(self, command: list[str], example: Example, cwd: Path, *, endless: bool = False) -> Printed:
        promised = [self._comparable(line) for line in example.output]
        printed: list[str] = []
        with (self.directory / "stderr").open("w+b") as errors:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            alarm = threading.Timer(BLOCK_TIMEOUT_SECS, end_group, (process,))
            alarm.start()
            try:
                assert process.stdout is not None
                with process.stdout:
                    for raw in process.stdout:
                        printed.append(self._comparable(raw.decode("utf-8")))
                        if endless and missing_line(promised, printed) is None:
                            break
                if endless:
                    end_group(process)
                code = process.wait(timeout=BLOCK_TIMEOUT_SECS)
            finally:
                alarm.cancel()
                end_group(process)
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace")
        where = f"line {example.line}: {example.block.content[0]}"
        assert endless or code == 0, f"{where}\nexit code {code}\n{''.join(printed)}\n{said}"
        return Printed(tuple(printed), said, missing_line(promised, printed))


def missing_line(promised: Sequence[str], printed: Sequence[str]) -> str | None:
    """The first expected line that is missing, in order; `…` matches any text."""
    rest = iter(printed)
    for line in promised:
        pattern = re.compile(".*".join(re.escape(piece) for piece in line.split("…")))
        if not any(pattern.fullmatch(candidate) for candidate in rest):
            return line
    return None


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Stop a block with all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.fail("Node.js, which runs the scripts of the pages, is missing; `make setup` installs it")
    return found
