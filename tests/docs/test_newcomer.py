"""`scripts/newcomer` finds its commands in the README; the long test runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests.docs.markdown import REPOSITORY
from tests.serving import server_environment

SCRIPT = REPOSITORY / "scripts" / "newcomer"


def test_the_readme_leads_to_a_live_tail() -> None:
    loader = SourceFileLoader("newcomer", str(SCRIPT))
    spec = spec_from_loader("newcomer", loader)
    assert spec is not None
    newcomer = module_from_spec(spec)
    loader.exec_module(newcomer)
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    before, tail = newcomer.quickstart(readme)
    assert any("-X PUT" in command for command in before)
    assert any("-X POST" in command for command in before)
    assert tail.startswith("curl -N ")
    assert "make run" in readme.partition("## Quickstart")[0]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_from_a_fresh_clone_to_a_live_tail_in_five_minutes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--limit", "300"],
        cwd=tmp_path,
        env=server_environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^ +[\d.]+ s  in total", done.stdout, re.MULTILINE), done.stdout
