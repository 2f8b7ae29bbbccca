"""The chats of the page "Streaming model output", as they are printed there: a reload in the middle loses nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import httpx
from playwright.sync_api import expect

from headwater import Stream
from tests.ai.processes import wait_until_answers
from tests.docs.markdown import REPOSITORY, blocks
from tests.docs.running import PRINTED_ADDRESS
from tests.examples.conftest import Tab
from tests.ports import free_port
from tests.serving import Server, server_environment

QUESTION = " ".join(f"word{n}" for n in range(30))
ANSWER = f"You asked: {QUESTION} And I answer, one word at a time."


def printed(mark: str) -> str:
    """The block of the page that contains a text."""
    return next(block.text for block in blocks(REPOSITORY / "docs" / "ai.md") if mark in block.text)


@contextmanager
def application(code: str, server: Server, directory: Path) -> Iterator[str]:
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


def test_the_first_chat_has_thirty_lines() -> None:
    assert len([line for line in printed("EventSource").splitlines() if line.strip()]) <= 30


def test_the_first_chat_survives_a_reload_and_a_second_tab(server: Server, tmp_path: Path, tab: Tab) -> None:
    with application(printed("EventSource"), server, tmp_path) as url:
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


def test_the_second_chat_answers_several_questions_and_resumes_and_stops_the_last(
    server: Server, tmp_path: Path
) -> None:
    with application(printed("latest_answer"), server, tmp_path) as url, httpx.Client(base_url=url) as http:

        def ask(question: str) -> str:
            message = {"role": "user", "parts": [{"type": "text", "text": question}]}
            asked = http.post("/api/chat", json={"id": "printed", "messages": [message]})
            assert asked.status_code == 201, asked.text
            return asked.headers["location"]

        assert http.get("/api/chat/printed/stream").status_code == 204
        with Stream(ask("One?")) as first:
            assert [event.get("delta") for event in first.follow()][2:5] == ["You ", "asked: ", "One? "]
        assert http.get("/api/chat/printed/stream").status_code == 204, "it has ended"
        with Stream(ask(QUESTION)) as second:
            assert http.get("/api/chat/printed/stream").headers["location"] == second.url
            reader = second.follow()
            assert len(list(islice(reader, 4))) == 4
            assert http.post("/api/chat/printed/stop").json() == {"stopped": True}
            assert list(reader)[-1] == {"type": "abort", "reason": "stopped"}
        assert http.post("/api/chat/printed/stop").json() == {"stopped": False}
