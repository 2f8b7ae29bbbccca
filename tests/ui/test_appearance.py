"""Appearance: dark and light, phone, keyboard; screenshots are stored in build/ui/."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.serving import Server
from tests.ui.conftest import Watched
from tests.ui.pages import Pages, post, put
from tests.ui.shop import open_shop

Keep = Callable[[Page, str], None]


@pytest.fixture(scope="module")
def shop() -> Iterator[Server]:
    with open_shop() as server:
        yield server


def test_a_stream_in_light_and_dark(browser: Browser, shop: Server, screenshot: Keep) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
        ui = Pages(context.new_page(), shop.url)
        ui.open_stream("orders/2026")
        ui.loaded(100)
        expect(ui.page.locator("#counts")).to_have_text("100 of 207 messages loaded")
        expect(ui.stream("orders/2026")).to_contain_text("207 messages")
        ui.messages.nth(8).click()
        expect(ui.page.locator("#detail")).to_be_visible()
        colours[scheme] = ui.page.evaluate("getComputedStyle(document.body).backgroundColor")
        screenshot(ui.page, f"stream-{scheme}")
        ui.press("theme")
        other = ui.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert other != colours[scheme], "the button changes it"
        ui.page.reload()
        expect(ui.page.locator("#stream-title")).to_be_visible()
        assert ui.page.evaluate("getComputedStyle(document.body).backgroundColor") == other, "and it stays"
        context.close()
    assert colours["light"] != colours["dark"]


def test_live_messages_in_a_picture(watched: Watched, shop: Server, screenshot: Keep) -> None:
    ui = Pages(watched.page(), shop.url)
    with httpx.Client(base_url=shop.url) as http:
        put(http, "ticks")
    ui.open_stream("ticks")
    ui.reader("live")
    stop = threading.Event()

    def write() -> None:
        chance = random.Random(2)
        with httpx.Client(base_url=shop.url) as http:
            while not stop.wait(0.05 + chance.random() * 0.1):
                count = chance.randint(1, 12)
                now = time.time_ns() // 1_000_000
                ticks = [{"symbol": "HWTR", "price": round(100 + chance.random(), 3), "ts": now} for _ in range(count)]
                post(http, "ticks", ticks)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        expect(ui.page.locator("#rates")).to_contain_text("delivery time")
        ui.loaded_more_than(200)
        screenshot(ui.page, "live")
    finally:
        stop.set()
        writer.join()


def test_the_views_in_pictures(watched: Watched, shop: Server, screenshot: Keep) -> None:
    ui = Pages(watched.page(), shop.url)
    for name, place, sign in (
        ("home", "", "#numbers .tile"),
        ("state", "#/stream/session-events?tab=state", "#entities [data-index]"),
        ("subscription", "#/subscription/billing", "#cursors tr[data-stream]"),
        ("pipeline", "#/pipeline", "[data-query]"),
        ("bytes", "#/stream/images/logo", "#messages [data-index]"),
    ):
        ui.open(place)
        expect(ui.page.locator(sign).first).to_be_visible()
        expect(ui.stream("archive/2025")).to_contain_text("closed")
        screenshot(ui.page, name)


def test_append_with_a_producer_in_a_picture(watched: Watched, shop: Server, screenshot: Keep) -> None:
    ui = Pages(watched.page(), shop.url)
    ui.open_stream("orders/2026")
    ui.page.keyboard.press("a")
    ui.append('{"order":207,"customer":"Ada","total":12.5,"items":[]}', ("checkout-7", "0", "0"))
    expect(ui.append('{"order":207,"customer":"Ada","total":12.5,"items":[]}')).to_contain_text("Duplicate")
    ui.page.locator("#append-answer").scroll_into_view_if_needed()
    screenshot(ui.page, "append")


def overflow(page: Page) -> int:
    """How many pixels stick out to the right."""
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert isinstance(wide, int)
    return wide


def test_on_a_phone(browser: Browser, shop: Server, screenshot: Keep) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 780}, has_touch=True, is_mobile=True)
    ui = Pages(context.new_page(), shop.url)
    ui.open()
    expect(ui.stream("orders/2026")).to_be_visible()
    expect(ui.page.locator("#main")).to_be_hidden()
    assert overflow(ui.page) == 0
    screenshot(ui.page, "phone-list")
    ui.stream("orders/2026").tap()
    expect(ui.page.locator("#stream-title")).to_be_visible()
    ui.reader("live")
    assert overflow(ui.page) == 0
    top = ui.page.locator("#messages").bounding_box()
    assert top is not None
    assert top["y"] < 300, "two thirds of the screen are for messages"
    screenshot(ui.page, "phone-stream")
    ui.messages.nth(3).tap()
    expect(ui.page.locator("#detail")).to_be_visible()
    screenshot(ui.page, "phone-message")
    ui.page.locator("#detail").get_by_title("Close (Esc)").tap()
    ui.page.get_by_title("All streams").tap()
    expect(ui.page.locator("#main")).to_be_hidden()
    ui.open("#/subscription/billing")
    lag = ui.page.locator("#cursors tr[data-stream] .badge").bounding_box()
    assert lag is not None
    assert lag["x"] + lag["width"] < 390, "the lag can be read without scrolling"
    context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_hex_has_its_characters_beside_it_on_every_screen(browser: Browser, shop: Server, width: int) -> None:
    with browser.new_context(viewport={"width": width, "height": 720}) as context:
        ui = Pages(context.new_page(), shop.url)
        ui.open_stream("images/logo")
        ui.reader("live")
        ui.messages.first.click()
        body = ui.page.locator("#detail-body")
        expect(body).to_contain_text("40 41 42 43 44 45 46 47  @ABCDEFG")
        assert body.evaluate("body => body.scrollWidth - body.clientWidth") == 0


def test_the_start_page_counts_the_streams_of_the_list(watched: Watched, shop: Server) -> None:
    """The metrics, which arrive first, count streams of the server itself too, which the list does not show."""
    ui = Pages(watched.page(), shop.url)
    metrics: list[Route] = []
    listings: list[Route] = []

    def answer_once(route: Route) -> None:
        metrics.append(route)
        if len(metrics) == 1:
            route.continue_()

    def hold(route: Route) -> None:
        listings.append(route)

    ui.page.route("**/metrics", answer_once)
    ui.page.route("**/__ds/streams*", hold)
    ui.open()
    streams = ui.page.locator("#numbers .tile").first
    expect(streams).to_be_visible()
    ui.page.unroute("**/__ds/streams*")
    for route in listings:
        route.continue_()
    expect(ui.stream("archive/2025")).to_contain_text("closed")
    listed = ui.page.locator("#stream-count").inner_text().removesuffix(" streams")
    expect(streams.locator("b")).to_have_text(listed)


def test_everything_can_be_reached_without_a_mouse(watched: Watched, shop: Server) -> None:
    ui = Pages(watched.page(), shop.url)
    ui.open()
    expect(ui.stream("orders/2026")).to_be_visible()
    keyboard = ui.page.keyboard
    keyboard.press("?")
    expect(ui.page.locator("dialog")).to_contain_text("follow new messages")
    keyboard.press("Escape")
    keyboard.press("/")
    keyboard.type("orders/2026")
    keyboard.press("Enter")
    expect(ui.page.locator("#stream-title")).to_have_text("orders/2026")
    ui.reader("live")
    keyboard.press("Escape")
    keyboard.press("2")
    expect(ui.page.locator("#tab-state")).to_have_attribute("aria-selected", "true")
    keyboard.press("1")
    ui.reader("live")
    ui.page.locator("#messages").focus()
    keyboard.press("Home")
    keyboard.press("ArrowDown")
    keyboard.press("Enter")
    expect(ui.page.locator("#detail h3")).to_have_text(re.compile(r"Message \d+"))
    keyboard.press("Escape")
    expect(ui.page.locator("#detail")).to_be_hidden()
    keyboard.press("t")
    expect(ui.page.locator("html")).to_have_attribute("data-theme", "dark")


def test_every_control_has_a_name(watched: Watched, shop: Server) -> None:
    ui = Pages(watched.page(), shop.url)
    for place in ("", "#/stream/orders/2026", "#/buckets", "#/subscription/billing", "#/pipeline"):
        ui.open(place)
        expect(ui.stream("orders/2026")).to_be_visible()
        nameless = ui.page.evaluate(
            """() => [...document.querySelectorAll('button, input, select, textarea')].filter((control) =>
                !control.textContent.trim() && !control.getAttribute('aria-label') && !control.title
                && !control.closest('label')).map((control) => control.outerHTML)"""
        )
        assert nameless == []
