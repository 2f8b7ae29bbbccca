"""The text editor in Chromium, with the official Yjs provider and server: every change reaches everyone, once."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, ProxySettings, expect

from tests.browser import WAIT_MS
from tests.examples.conftest import CUT
from tests.examples.network import Network
from tests.examples.running import RunningExample, running_example
from tests.waiting import wait_until

TEXT = """[...document.querySelectorAll('.cm-line')].map((line) => {
    const copy = line.cloneNode(true)
    copy.querySelectorAll('.cm-ySelectionCaret, .cm-placeholder, .cm-widgetBuffer').forEach((widget) => widget.remove())
    return copy.textContent
}).join('\\n')"""
Editor = Callable[[], Page]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExample]:
    with running_example("editor", tmp_path_factory.mktemp("editor")) as run:
        yield run


@pytest.fixture
def editor(browser: Browser, run: RunningExample, network: Network) -> Iterator[Editor]:
    """Opens the same new document, each time in a new browser profile. The first one uses `network`."""
    url = f"{run.url}/?doc={uuid.uuid4()}"
    contexts: list[BrowserContext] = []
    errors: list[str] = []

    def open_editor() -> Page:
        through = ProxySettings(server=network.url, bypass="<-loopback>")
        context = browser.new_context(proxy=None if contexts else through)
        context.on("weberror", lambda error: errors.append(str(error.error)))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(url)
        saved(page)
        return page

    network.restore()
    yield open_editor
    for context in contexts:
        context.close()
    assert [error for error in errors if error not in CUT] == []


def saved(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("saved", timeout=60_000)


def text_of(page: Page) -> str:
    text = page.evaluate(TEXT)
    assert isinstance(text, str)
    return text


def shows(page: Page, wanted: Callable[[str], bool], limit_s: float = 60.0) -> str:
    return wait_until(lambda: text_of(page), wanted, limit_s=limit_s, every_s=0.1)


def type_at_end(page: Page, text: str) -> None:
    page.locator(".cm-content").focus()
    page.keyboard.press("Control+End")
    page.keyboard.type(text)


def test_two_editors_type_at_once_and_see_the_same(editor: Editor) -> None:
    one, two = editor(), editor()
    expect(one.locator("#people li")).to_have_count(2)
    for n in range(8):
        type_at_end(one, f"[a{n}]")
        type_at_end(two, f"[b{n}]")
    both = "".join(f"[{who}{n}]" for who in "ab" for n in range(8))
    text = shows(one, lambda text: len(text) == len(both))
    # What both type at one place may alternate letter by letter; no letter is missing, and none is there twice.
    assert sorted(text) == sorted(both)
    shows(two, lambda other: other == text)


def test_a_reload_in_the_middle_of_typing_loses_nothing(editor: Editor) -> None:
    one, two = editor(), editor()
    type_at_end(one, "before the reload, ")
    one.reload()
    saved(one)
    type_at_end(one, "after it")
    shows(one, lambda text: text == "before the reload, after it")
    shows(two, lambda text: text == "before the reload, after it")


@pytest.mark.parametrize("part", ["server", pytest.param("documents", marks=pytest.mark.long)])
def test_a_killed_process_delays_changes_and_loses_none(editor: Editor, run: RunningExample, part: str) -> None:
    one, two = editor(), editor()
    type_at_end(one, "one ")
    shows(two, lambda text: text == "one ")
    run.kill(part)
    type_at_end(one, "two ")
    shows(two, lambda text: text == "one two ")
    type_at_end(two, "three")
    shows(one, lambda text: text == "one two three")


@pytest.mark.parametrize("offline_ms", [1_500, pytest.param(60_000, marks=pytest.mark.long)])
def test_what_is_typed_offline_is_merged_afterwards(editor: Editor, network: Network, offline_ms: int) -> None:
    one, two = editor(), editor()
    type_at_end(one, "start ")
    shows(two, lambda text: text == "start ")
    network.cut()
    type_at_end(one, "offline ")
    expect(one.locator("#status")).to_contain_text("offline")
    type_at_end(two, "online ")
    one.wait_for_timeout(offline_ms)
    assert text_of(one) == "start offline "
    assert text_of(two) == "start online "
    network.restore()
    text = shows(one, lambda text: len(text) == len("start online offline "))
    assert text in {"start online offline ", "start offline online "}
    shows(two, lambda other: other == text)


@pytest.mark.long
def test_an_editor_that_is_closed_is_no_longer_shown(editor: Editor) -> None:
    one, two = editor(), editor()
    expect(one.locator("#people li")).to_have_count(2)
    two.context.close()
    expect(one.locator("#people li")).to_have_count(1, timeout=60_000)


def test_what_was_typed_offline_survives_a_reload_of_the_page(editor: Editor, network: Network) -> None:
    one = editor()
    # The transactions of the last letters can end with the page. Here, those of all letters do.
    one.evaluate("() => { IDBObjectStore.prototype.add = function () { return this.count() } }")
    network.cut()
    type_at_end(one, "typed offline")
    network.restore()
    one.reload()
    saved(one)
    shows(one, lambda text: text == "typed offline")
    shows(editor(), lambda text: text == "typed offline")
