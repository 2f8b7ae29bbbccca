"""The MCP server of the examples with the official client: killed in the middle of a call, it loses no work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.examples.loading import EXAMPLES
from tests.examples.running import RunningExample, running_example
from tests.serving import server_environment


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExample]:
    with running_example("mcp", tmp_path_factory.mktemp("mcp")) as run:
        yield run


def test_a_client_keeps_its_session_and_the_tool_its_work_when_the_server_is_killed(run: RunningExample) -> None:
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "mcp" / "client.py"), f"{run.url}/mcp/", "Ulysses"],
        env=server_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    with process.stdout:
        for line in process.stdout:
            said.append(line.strip())
            if line.startswith("chapter 2 "):
                run.kill("books")
    assert process.wait(60) == 0
    assert said[0].startswith("session opened")
    assert said[-1] == f"read chapters {list(range(1, 21))}"
    assert sum(line.startswith("interrupted") for line in said) >= 1
    assert httpx.get(f"{run.streams}/books/Ulysses").json() == list(range(1, 21))
