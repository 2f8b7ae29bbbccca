"""The commands of the deployment pages run as printed against a real stack; only the ports differ."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import REPOSITORY, Block, blocks
from tests.stack.stacks import Stack, stack

PAGES = sorted((REPOSITORY / "docs" / "deployment").glob("*.md"))
MARK = "tests/stack/test_docs.py"


def commands_of(page: Path) -> list[tuple[Block, tuple[str, ...]]]:
    """The blocks to run, each with the expected output that follows it on the page."""
    found = blocks(page)
    chosen = []
    for block, after in zip(found, [*found, None][1:], strict=True):
        if block.language != "bash" or block.run_by != MARK:
            continue
        follows = after is not None and after.language == "text" and after.line == block.line + len(block.content) + 2
        chosen.append((block, after.content if after is not None and follows else ()))
    return chosen


def as_run(text: str, made: Stack) -> str:
    for printed, name in (("8080", "proxy"), ("4437", "server")):
        text = text.replace(f"localhost:{printed}", f"localhost:{made.ports[name]}")
    return re.sub(r"(?m)(^|\$\()headwater ", rf"\1{sys.executable} -m headwater ", text)


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_as_printed(page: Path, tmp_path: Path) -> None:
    with stack(tmp_path) as made:
        for block, promised in commands_of(page):
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", as_run(block.text, made)],
                cwd=tmp_path,
                env=made.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=240,  # it starts a whole stack
            )
            where = f"{page.name}, line {block.line}"
            assert done.returncode == 0, f"{where}: {done.stdout}\n{done.stderr}\n{made.logs()}"
            if promised:
                assert done.stdout.split() == " ".join(promised).split(), where


def test_pages_contain_commands() -> None:
    assert [page.stem for page in PAGES if commands_of(page)] == ["auth", "index"]


def test_table_of_ports_has_the_settings_and_their_defaults() -> None:
    from headwater.config.describe import described_settings

    known = {setting.variable: setting.default for setting in described_settings()}
    page = (REPOSITORY / "docs" / "deployment" / "ports.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (\d+)\b[^|]*\| `(DS_\w+)` \|", page)
    assert len(rows) == 9
    for port, variable in rows:
        assert known[variable] == port, variable
