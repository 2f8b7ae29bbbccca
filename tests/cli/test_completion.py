"""Completion in a real shell: installed into a temporary home, then used with Tab."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import server_environment


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory, and the command on its PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    script = commands / "headwater"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headwater "$@"\n')
    script.chmod(0o755)
    return tmp_path


def in_bash(home: Path, script: str) -> str:
    environment = server_environment(HOME=str(home), SHELL="/bin/bash")
    environment["PATH"] = f"{home / 'bin'}:{environment['PATH']}"
    # With a second command the shell stays the parent of the first, which detects the shell by its parent.
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\nexit $?"],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Do what Tab does: call the registered function with the words so far, and read its completions.
_TAB = """
. ~/.bashrc
tab() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  local handler; handler=$(complete -p headwater | sed 's/.*-F \\([^ ]*\\).*/\\1/')
  "$handler" headwater "${@: -1}" ""
  echo "${COMPREPLY[@]}"
}
"""


def test_installed_completion_completes_commands_and_options(home: Path) -> None:
    assert "completion installed" in in_bash(home, "headwater --install-completion")
    said = in_bash(home, f"{_TAB}\ntab headwater re\ntab headwater store c\ntab headwater tail --res").splitlines()
    assert [set(line.split()) for line in said] == [
        {"read", "restore"},
        {"check", "confirm-expiry", "copy"},
        {"--resume"},
    ]


def test_completion_script_can_be_printed(home: Path) -> None:
    assert "_HEADWATER_COMPLETE=complete_bash" in in_bash(home, "headwater --show-completion")
    assert not (home / ".bashrc").exists()
