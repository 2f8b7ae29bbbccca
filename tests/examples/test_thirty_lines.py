"""The chat of the page "Streaming model output", as it is printed there: a reload in the middle loses nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect

from tests.ai.app import wait_until_answers
from tests.docs.markdown import REPOSITORY, blocks
from tests.docs.running import PRINTED_ADDRESS
from tests.examples.conftest import Tab
from tests.ports import free_port
from tests.serving import Server, server_environment

QUESTION = " ".join(f"word{n}" for n in range(30))
ANSWER = f"You asked: {QUESTION} And I answer, one word at a time."


@contextmanager
def printed_application(server: Server, directory: Path) -> Iterator[str]:
    code = next(block.text for block in blocks(REPOSITORY / "docs" / "ai.md") if "EventSource" in block.text)
    assert len([line for line in code.splitlines() if line.strip()]) <= 36, "the page promises about thirty lines"
    (directory / "chat.py").write_text(code.replace(PRINTED_ADDRESS, f"localhost:{server.port}"), encoding="utf-8")
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "chat:app", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=directory, env=server_environment())
    try:
        wait_until_answers(port)
        yield f"http://localhost:{port}/"
    finally:
        process.kill()
        process.wait(30)


def test_the_printed_chat_survives_a_reload_and_a_second_tab(server: Server, tmp_path: Path, tab: Tab) -> None:
    with printed_application(server, tmp_path) as url:
        page = tab(url)
        page.locator("input").fill(QUESTION)
        page.keyboard.press("Enter")
        answer = page.locator("p")
        expect(answer).to_contain_text("word3 ")
        page.reload()
        second = tab(page.url)
        expect(answer).to_contain_text("word6 ")
        expect(answer).to_have_text(ANSWER)
        expect(second.locator("p")).to_have_text(ANSWER)
        page.reload()
        expect(answer).to_have_text(ANSWER)
