"""The chat example in Chromium, with its real processes: whatever happens to an answer, each token is shown once.

The application uses the OpenAI-compatible endpoint of the test, so that the test decides when a token is said. Texts
are compared while the answer is still open: afterwards the page shows what the application has stored.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.examples.conftest import Tab
from tests.examples.model import Model
from tests.examples.network import Network
from tests.examples.running import RunningExample, running_example
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model().serving() as model:
        yield model


@pytest.fixture(scope="module")
def run(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExample]:
    data = tmp_path_factory.mktemp("chat")
    with running_example("chat", data, OPENAI_BASE_URL=model.url, OPENAI_MODEL="test") as run:
        yield run


@pytest.fixture
def chat(run: RunningExample, model: Model) -> str:
    """The address of a new chat."""
    model.reset()
    return f"{run.url}/?chat={uuid.uuid4()}"


def words(first: int, last: int) -> list[str]:
    return [f"word{n} " for n in range(first, last)]


def ask(page: Page, question: str) -> None:
    expect(page.locator("#status")).to_have_text("ready")
    page.locator("#question").fill(question)
    page.keyboard.press("Enter")


def shows(page: Page, *messages: str) -> None:
    expect(page.locator("#messages .text")).to_have_text([message.strip() for message in messages])


def ready(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("li.writing")).to_have_count(0)


def test_a_reload_in_the_middle_of_an_answer_continues_it(chat: str, model: Model, tab: Tab) -> None:
    page = tab(chat)
    ask(page, "Is <b>this</b> lost?")
    model.say(*words(0, 5))
    shows(page, "Is <b>this</b> lost?", "".join(words(0, 5)))
    page.reload()
    shows(page, "Is <b>this</b> lost?", "".join(words(0, 5)))
    model.say(*words(5, 10))
    shows(page, "Is <b>this</b> lost?", "".join(words(0, 10)))
    page.reload()
    model.say(*words(10, 12))
    shows(page, "Is <b>this</b> lost?", "".join(words(0, 12)))
    model.finish()
    ready(page)
    shows(page, "Is <b>this</b> lost?", "".join(words(0, 12)))
    ask(page, "And again?")
    model.say("yes")
    model.finish()
    shows(page, "Is <b>this</b> lost?", "".join(words(0, 12)), "And again?", "yes")
    assert [said["role"] for said in model.requests[-1]["messages"]] == ["user", "assistant", "user"]


def test_two_tabs_show_the_same_and_either_may_ask(chat: str, model: Model, tab: Tab) -> None:
    first = tab(chat)
    ask(first, "One?")
    model.say(*words(0, 3))
    second = tab(chat)
    shows(second, "One?", "".join(words(0, 3)))
    model.say(*words(3, 6))
    for page in (first, second):
        shows(page, "One?", "".join(words(0, 6)))
    model.finish()
    for page in (first, second):
        ready(page)
    ask(second, "Two?")
    model.say(*words(6, 9))
    for page in (first, second):
        shows(page, "One?", "".join(words(0, 6)), "Two?", "".join(words(6, 9)))
    model.finish()
    for page in (first, second):
        ready(page)


def test_a_killed_server_delays_an_answer_and_loses_nothing(
    chat: str, run: RunningExample, model: Model, tab: Tab
) -> None:
    page = tab(chat)
    ask(page, "Who remembers?")
    model.say(*words(0, 5))
    shows(page, "Who remembers?", "".join(words(0, 5)))
    run.kill("server")
    model.say(*words(5, 10))
    shows(page, "Who remembers?", "".join(words(0, 10)))
    model.finish()
    ready(page)
    page.reload()
    shows(page, "Who remembers?", "".join(words(0, 10)))


def test_an_answer_of_a_killed_application_ends_with_an_error_and_the_chat_continues(
    chat: str, run: RunningExample, model: Model, tab: Tab
) -> None:
    page = tab(chat)
    ask(page, "Still there?")
    model.say(*words(0, 3))
    shows(page, "Still there?", "".join(words(0, 3)))
    run.kill("application")
    expect(page.locator(".end")).to_have_text("The answer could not be generated.")
    model.reset()
    ask(page, "And now?")
    model.say("yes")
    model.finish()
    shows(page, "Still there?", "".join(words(0, 3)), "And now?", "yes")


def test_the_stop_button_ends_the_answer_in_every_tab(chat: str, model: Model, tab: Tab) -> None:
    first, second = tab(chat), tab(chat)
    ask(first, "Too long?")
    model.say(*words(0, 4))
    for page in (first, second):
        shows(page, "Too long?", "".join(words(0, 4)))
    second.get_by_role("button", name="Stop").click()
    for page in (first, second):
        ready(page)
        expect(page.locator(".end")).to_have_text("Stopped.")
        shows(page, "Too long?", "".join(words(0, 4)))
    assert model.hung_up.wait(60), "the request to the model is ended too"


@pytest.mark.long
def test_closing_every_tab_does_not_end_an_answer(chat: str, model: Model, tab: Tab) -> None:
    page = tab(chat)
    ask(page, "Alone?")
    model.say(*words(0, 2))
    shows(page, "Alone?", "".join(words(0, 2)))
    page.close()
    model.say(*words(2, 8))
    model.finish()
    api = chat.replace("?chat=", "api/chat/")
    messages = wait_until(lambda: httpx.get(api).json()["messages"], lambda found: len(found) == 2)
    assert messages[1]["parts"] == [{"type": "text", "text": "".join(words(0, 8))}]
    shows(tab(chat), "Alone?", "".join(words(0, 8)))


@pytest.mark.parametrize("offline_ms", [1_500, pytest.param(60_000, marks=pytest.mark.long)])
def test_an_answer_that_continues_while_a_browser_is_offline_is_shown_afterwards(
    chat: str, model: Model, tab: Tab, network: Network, offline_ms: int
) -> None:
    page = tab(chat)
    ask(page, "In a tunnel?")
    model.say(*words(0, 5))
    shows(page, "In a tunnel?", "".join(words(0, 5)))
    network.cut()
    assert network.cut_connections > 0
    model.say(*words(5, 20))
    expect(page.locator("#status")).to_have_text("reconnecting")
    page.wait_for_timeout(offline_ms)
    shows(page, "In a tunnel?", "".join(words(0, 5)))
    network.restore()
    expect(page.locator("#messages .text").nth(1)).to_have_text("".join(words(0, 20)).strip(), timeout=90_000)
    model.say(*words(20, 25))
    expect(page.locator("#messages .text").nth(1)).to_have_text("".join(words(0, 25)).strip(), timeout=90_000)
    model.finish()
    ready(page)


@pytest.mark.long
def test_a_question_asked_while_offline_stays_in_its_box(chat: str, model: Model, tab: Tab, network: Network) -> None:
    page = tab(chat)
    ready(page)
    network.cut()
    page.locator("#question").fill("Did it arrive?")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("reconnecting")
    network.restore()
    expect(page.locator("#question")).to_have_value("Did it arrive?")
    ask(page, "Did it arrive?")
    model.say("yes")
    model.finish()
    shows(page, "Did it arrive?", "yes")
