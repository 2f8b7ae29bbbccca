"""Runs the command as a shell does, against one server."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from headwater.cli import main
from tests.serving import server_environment

OURS = "headwater"
NODE = "node"


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: bytes
    stderr: bytes


class Shell:
    """Runs the command against one server, in one directory."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory

    def start(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start the command as a separate process, for tests that do something while it runs."""
        return subprocess.Popen(
            [sys.executable, "-m", "headwater", *arguments],
            cwd=self.directory,
            env=server_environment(DS_URL=self.url),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str, stdin: bytes = b"") -> Done:
        """Run the command in this process, because starting Python takes longer than most commands."""
        given, out, said = (io.TextIOWrapper(io.BytesIO(data), write_through=True) for data in (stdin, b"", b""))
        with (
            chdir(self.directory),
            patch.dict(os.environ, {"DS_URL": self.url}),
            patch.multiple(sys, stdin=given, stdout=out, stderr=said),
            pytest.raises(SystemExit) as ended,
        ):
            main(list(arguments))
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, out.buffer.getvalue(), said.buffer.getvalue())

    def ok(self, *arguments: str, stdin: bytes = b"") -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def fails(self, code: int, *arguments: str, stdin: bytes = b"") -> str:
        """Run a command that must fail with this code; return its line on stderr."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == code, done.stderr.decode()
        [line] = done.stderr.decode().splitlines()
        assert line.startswith("headwater: ")
        return line


def on_terminal(shell: Shell, *arguments: str, stdin: bytes = b"") -> tuple[bytes, str]:
    """Run a command whose stderr is a terminal; return its stdout and what the terminal shows."""
    leader, follower = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "headwater", *arguments],
        cwd=shell.directory,
        env=server_environment(DS_URL=shell.url, TERM="xterm"),
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=follower,
        timeout=60,
    )
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert done.returncode == 0, shown
    return done.stdout, shown
