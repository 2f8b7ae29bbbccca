"""Finding messages: the newest first, earlier ones, filters, search on the server, columns, links, times."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime

import httpx
from playwright.sync_api import expect

from tests.ui.conftest import Watched
from tests.ui.pages import BYTES, TEXT, Pages, post, put


def fill(http: httpx.Client, name: str, count: int) -> None:
    put(http, name)
    values = [{"n": n, "user": {"name": "ann" if n % 10 == 0 else "bob"}, "total": n / 2} for n in range(count)]
    post(http, name, json.dumps(values))


def test_a_stream_opens_with_its_last_messages_and_loads_earlier_ones(ui: Pages, http: httpx.Client) -> None:
    fill(http, "find/last", 1250)
    ui.open_stream("find/last")
    ui.reader("live")
    ui.loaded(100)
    expect(ui.messages.last).to_contain_text('"n": 1249')
    expect(ui.page.locator("#counts")).to_have_text("100 of 1,250 messages loaded")
    expect(ui.page.locator("#stream-badges")).to_contain_text("1,250 messages")
    ui.press("load-older")
    ui.loaded(1100)
    ui.press("load-older")
    ui.loaded(1250)
    expect(ui.page.locator("#older")).to_be_hidden()
    post(http, "find/last", {"n": 1250})
    expect(ui.page.locator("#counts")).to_have_text("1,251 messages")
    expect(ui.page.locator("#stream-badges")).to_contain_text("1,251 messages")


def test_the_whole_stream_is_searched_on_the_server(ui: Pages, http: httpx.Client) -> None:
    fill(http, "find/whole", 1250)
    ui.open_stream("find/whole")
    ui.loaded(100)
    ui.page.locator("#search").fill("n=7")
    expect(ui.page.locator("#found")).to_have_text("0 found of 100 loaded; Enter searches all")
    ui.page.locator("#search").fill("user.name=ann total<20")
    ui.page.locator("#search").press("Enter")
    expect(ui.page.locator("#found")).to_have_text("4 found in the whole stream")
    expect(ui.page.locator("#messages .preview")).to_contain_text(['"n": 0', '"n": 10', '"n": 20', '"n": 30'])
    expect(ui.page.locator("#messages mark").first).to_have_text("ann")
    ui.messages.nth(1).click()
    expect(ui.page.locator("#detail h3")).to_have_text("Message 10")
    ui.page.locator("#search").fill("")
    ui.loaded(100)


def test_a_long_search_can_be_stopped(ui: Pages, http: httpx.Client) -> None:
    put(http, "find/stop", TEXT)
    for _ in range(4):
        post(http, "find/stop", "x" * 1_000_000, TEXT)
    ui.open_stream("find/stop")
    ui.loaded(4)
    ui.page.route("**/find/stop?*find=*", lambda _: None, times=1)  # the answer does not arrive
    ui.page.locator("#search").fill("needle")
    ui.page.locator("#search").press("Enter")
    expect(ui.page.locator("#found progress")).to_be_visible()
    ui.press("stop-search")
    expect(ui.page.locator("#found")).to_contain_text("stopped")


def test_filters_compare_fields(ui: Pages, http: httpx.Client) -> None:
    put(http, "find/fields")
    post(http, "find/fields", [{"a": 1, "b": {"c": "x y"}}, {"a": 10, "b": {"c": "z"}}, {"a": "10"}, [1], "a"])
    ui.open_stream("find/fields")
    ui.loaded(5)
    for text, count in (("a=10", 2), ("a>5", 2), ("a<5", 1), ("a!=1", 4), ('b.c="x y"', 1), ("b.c~Z", 1), ("x z", 0)):
        ui.page.locator("#search").fill(text)
        expect(ui.page.locator("#found")).to_have_text(f"{count} found of 5 loaded")


def test_fields_become_columns_and_stay(ui: Pages, http: httpx.Client) -> None:
    fill(http, "find/columns", 20)
    ui.open_stream("find/columns")
    ui.loaded(20)
    ui.press("fields")
    ui.page.get_by_label("user.name").check()
    ui.page.keyboard.press("Escape")
    expect(ui.page.locator(".columns .field")).to_have_text(["user.name"])
    expect(ui.messages.nth(10).locator(".field")).to_have_text("ann")
    ui.page.reload()
    ui.loaded(20)
    expect(ui.messages.nth(1).locator(".field")).to_have_text("bob")


def test_a_message_has_a_url(ui: Pages, watched: Watched, http: httpx.Client) -> None:
    fill(http, "find/link", 300)
    ui.open_stream("find/link", "?from=-1")
    ui.loaded(300)
    ui.page.locator("#messages").focus()
    ui.page.keyboard.press("Home")
    ui.page.keyboard.press("Enter")
    expect(ui.page.locator("#detail h3")).to_have_text("Message 0")
    link = ui.copied(ui.page.locator("#detail").get_by_role("button", name="Link"))
    expect(ui.page).to_have_url(link)
    other = watched.page()
    other.goto(link)
    expect(other.locator("#detail h3")).to_have_text("Message 0")
    other.keyboard.press("Escape")
    expect(other).not_to_have_url(re.compile("message="))


def test_history_shows_arrival_times_and_can_start_at_one(ui: Pages, http: httpx.Client) -> None:
    before = datetime.now(UTC)
    fill(http, "find/times", 3)
    ui.open_stream("find/times")
    ui.loaded(3)
    shown = ui.messages.nth(0).locator(".time").get_attribute("title")
    assert shown is not None
    assert before.timestamp() - 1 <= datetime.fromisoformat(shown).timestamp() <= time.time() + 1
    ui.page.locator("#from").select_option("time")
    ui.page.locator("#from-time").fill("2100-01-01T00:00:00")
    ui.page.locator("#from-time").press("Enter")
    ui.loaded(0)
    expect(ui.page.locator("#no-messages")).to_contain_text("3 earlier messages not loaded")
    ui.page.locator("#from-time").fill("2020-01-01T00:00:00")
    ui.page.locator("#from-time").press("Enter")
    ui.loaded(3)


def test_a_stream_without_messages_says_how_to_append(ui: Pages, http: httpx.Client) -> None:
    put(http, "find/empty", TEXT)
    ui.open_stream("find/empty")
    expect(ui.page.locator("#no-messages")).to_contain_text("headwater append find/empty")
    post(http, "find/empty", "hello", TEXT)
    ui.loaded(1)
    expect(ui.page.locator("#no-messages")).to_be_hidden()


def test_bytes_found_on_the_server_are_shown(ui: Pages, http: httpx.Client) -> None:
    put(http, "find/bytes", BYTES)
    for content in (b"\x00\x01", b"\x00needle\xff"):
        post(http, "find/bytes", content, BYTES)
    ui.open_stream("find/bytes")
    ui.loaded(2)
    ui.page.locator("#search").fill("needle")
    ui.page.locator("#search").press("Enter")
    expect(ui.page.locator("#found")).to_have_text("1 found in the whole stream")
    ui.messages.first.click()
    expect(ui.page.locator("#detail-body")).to_contain_text(re.compile(r"00 6e 65 65 64 6c 65 ff.*\.needle\."))
