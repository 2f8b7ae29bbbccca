"""The chat: in a real browser, through a reload and a killed script, no token is lost and none is said twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.docs.pictures import FLAGS, chat_script
from tests.examples.loading import example
from tests.serving import Server
from tests.ui.conftest import chromium

chat = example("chat/chat")
QUESTION = "Is <b>this</b> lost on a reload?"
STRANGE = [
    None,
    7,
    {"type": "message"},
    {"key": "x", "type": "message", "value": "text"},
    {"key": "x", "type": "chunk"},
]
"""What others may have written into the session."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), headless=True, args=list(FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    opened = context.new_page()
    opened.set_default_timeout(20_000)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    context.close()
    assert errors == []


def whole(question: str) -> str:
    return "".join(chat.tokens_for(question))


def test_a_reload_in_the_middle_of_an_answer_loses_nothing(
    page: Page, server: Server, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    answer = page.locator("li.assistant")
    httpx.put(server.stream_url(name), json=STRANGE).raise_for_status()
    with chat_script(server, name, pause_s=0.03) as address:
        page.goto(address)
        expect(page.locator("#status")).to_have_text("live")
        page.locator("#question").fill(QUESTION)
        page.keyboard.press("Enter")
        expect(answer).to_contain_text("durable stream")
        page.reload()
        expect(page.locator("li.you")).to_have_text(QUESTION)
        expect(answer).to_contain_text("durable stream")
        assert answer.inner_text() != whole(QUESTION), "it is still answering"
        expect(answer).to_have_text(whole(QUESTION))
        expect(page.locator("li.streaming")).to_have_count(0)
        page.locator("#question").fill("And again?")
        page.keyboard.press("Enter")
        expect(answer).to_have_count(2)
        expect(answer.nth(1)).to_have_text(whole("And again?"))
    events = httpx.get(server.stream_url(name)).json()
    said = events[len(STRANGE) :]
    chunks = [event["value"]["text"] for event in said if event["type"] == "chunk"]
    assert chunks == [*chat.tokens_for(QUESTION), *chat.tokens_for("And again?")]


def test_a_script_that_is_killed_goes_on_with_the_next_token(
    page: Page, server: Server, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    with chat_script(server, name, pause_s=0.03) as address:
        page.goto(address)
        page.locator("#question").fill("Who remembers?")
        page.keyboard.press("Enter")
        expect(page.locator("li.assistant")).to_contain_text("append-only")
    before = httpx.get(server.stream_url(name)).json()
    assert len(before) < 1 + len(list(chat.tokens_for("Who remembers?")))
    with chat_script(server, name, pause_s=0.0):
        expect(page.locator("li.assistant")).to_have_text(whole("Who remembers?"))
        expect(page.locator("li.streaming")).to_have_count(0)
    events = httpx.get(server.stream_url(name)).json()
    chunks = [event["value"]["text"] for event in events if event["type"] == "chunk"]
    assert chunks == list(chat.tokens_for("Who remembers?"))
    assert events[-1]["value"]["text"] == whole("Who remembers?")
