"""The session of agents in Chromium: through reloads and killed agents, no token is lost and none is said twice."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.examples.conftest import Tab
from tests.examples.loading import example
from tests.examples.running import RunningExample, running_example

agents = example("agents/agents")
STRANGE = [
    None,
    7,
    {"type": "message"},
    {"key": "x", "type": "message", "value": "text"},
    {"key": "x", "type": "chunk"},
]
"""What others may have written into the session."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExample]:
    with running_example("agents", tmp_path_factory.mktemp("agents")) as run:
        httpx.post(f"{run.streams}/chat/demo", json=STRANGE).raise_for_status()
        yield run


def said_by(role: int, question: str) -> str:
    return "".join(agents.tokens_for(agents.ROLES[role], question))


def ask(page: Page, question: str) -> None:
    expect(page.locator("#status")).to_have_text("live")
    page.locator("#question").fill(question)
    page.keyboard.press("Enter")


def test_a_question_passes_three_agents_through_a_reload_and_a_killed_agent(run: RunningExample, tab: Tab) -> None:
    question = "Who <b>remembers</b>?"
    page = tab(run.url)
    present = page.locator("#presence li:not(.gone)")
    expect(present.filter(has_text="planner")).to_have_count(1)
    expect(present.filter(has_text="writer")).to_have_count(1)
    ask(page, question)
    writer = page.locator("li[data-from=writer]")
    expect(writer).to_contain_text("reload")
    run.kill("writer")
    page.reload()
    expect(page.locator("#messages li.you")).to_have_text(question)
    expect(page.locator("li[data-from=planner]")).to_have_text(said_by(0, question).strip())
    expect(page.locator("li[data-from=researcher]")).to_have_text(said_by(1, question).strip())
    expect(writer).to_have_text(said_by(2, question).strip())
    expect(page.locator("li.streaming")).to_have_count(0)
    events = httpx.get(f"{run.streams}/chat/demo").json()[len(STRANGE) :]
    for n, role in enumerate(agents.ROLES):
        chunks = [e["value"]["text"] for e in events if e["type"] == "chunk" and e["value"]["from"] == role.name]
        assert chunks == list(agents.tokens_for(role, question))
        whole = [e["value"]["text"] for e in events if e["type"] == "message" and e["value"]["from"] == role.name]
        assert whole == [said_by(n, question)]


@pytest.mark.long
def test_a_participant_that_is_silent_is_shown_as_gone(run: RunningExample, tab: Tab) -> None:
    first = tab(run.url)
    second = tab(run.url)
    people = first.locator("#presence li:not(.gone)").filter(has_text="you (")
    expect(people).to_have_count(2)
    second.close()
    expect(people).to_have_count(1)
    expect(first.locator("#presence li.gone").filter(has_text="you (")).not_to_have_count(0)
