"""Reading a stream: from any offset, in pages, then live; pause, follow, search, details, many messages."""

from __future__ import annotations

import json
import re
import threading
import time

import httpx
from playwright.sync_api import Page, expect

from tests.ui.conftest import Starter, Watched
from tests.ui.pages import BYTES, JSON, TEXT, Pages, post, put
from tests.waiting import wait_until

MANY = 100_000
ROW_PARTS_MAX = 1_000
"""Elements that one step of scrolling may make: those of the visible rows, however many messages there are."""


def test_from_the_start_then_live(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/start")
    post(http, "read/start", [{"n": 0}, {"n": 1}])
    ui.open_stream("read/start")
    ui.reader("live")
    expect(ui.page.locator("#reader-status")).to_contain_text("live over SSE")
    ui.shows('{"n": 0}', '{"n": 1}')
    post(http, "read/start", {"n": 2})
    ui.loaded(3)
    expect(ui.messages.last).to_contain_text('{"n": 2}')


WATCH = """() => {
    window.frames_seen = [];
    const number = (id) => Number(/(\\d+) message/.exec(document.getElementById(id).textContent)?.[1] ?? 0);
    const look = () => {
        const rows = [...document.querySelectorAll('#messages [data-index]')].map((row) => Number(row.dataset.index));
        window.frames_seen.push([number('stream-badges'), number('counts'), Math.max(...rows) + 1]);
        requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
}"""


def test_counts_and_rows_agree_in_every_frame(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/agree")
    post(http, "read/agree", [{"n": 0}])
    ui.open_stream("read/agree")
    ui.reader("live")
    ui.loaded(1)
    expect(ui.page.locator("#stream-badges")).to_contain_text("1 message")
    ui.page.evaluate(WATCH)
    for n in range(1, 40):
        post(http, "read/agree", [{"n": n}])
        if n % 10 == 0:
            ui.page.wait_for_function("n => window.frames_seen.at(-1)[2] > n", arg=n - 10)
    ui.loaded(40)
    seen = ui.page.evaluate("window.frames_seen")
    assert len({row for _, _, row in seen}) > 2, "the page was watched while messages arrived"
    assert [frame for frame in seen if len(set(frame)) > 1] == []


def test_from_now(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/now")
    post(http, "read/now", {"old": True})
    ui.open_stream("read/now")
    ui.loaded(1)
    ui.page.locator("#from").select_option("now")
    ui.reader("live")
    ui.loaded(0)
    post(http, "read/now", {"new": True})
    ui.loaded(1)
    expect(ui.messages).to_contain_text(['{"new": true}'])


def test_from_an_offset(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/offset")
    behind_first = post(http, "read/offset", {"n": 0})
    post(http, "read/offset", {"n": 1})
    ui.open_stream("read/offset")
    ui.loaded(2)
    ui.page.locator("#from").select_option("offset")
    ui.page.locator("#from-offset").fill(behind_first)
    ui.page.locator("#from-offset").press("Enter")
    ui.loaded(1)
    expect(ui.messages).to_contain_text(['{"n": 1}'])
    ui.page.locator("#from-offset").fill("nonsense")
    ui.page.locator("#from-offset").press("Enter")
    expect(ui.page.locator("#reader-notice")).to_contain_text("400")


def test_over_long_poll(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/poll", TEXT)
    post(http, "read/poll", "one", TEXT)
    ui.open_stream("read/poll")
    ui.page.locator("#transport").select_option("long-poll")
    expect(ui.page.locator("#reader-status")).to_have_attribute("data-transport", "long-poll")
    for number, text in enumerate(("two", "three"), 2):
        post(http, "read/poll", text, TEXT)
        ui.loaded(number)
    ui.shows("one", "two", "three")


def test_falls_back_to_long_poll_where_events_are_blocked(watched: Watched, http: httpx.Client, ui: Pages) -> None:
    put(http, "read/fallback")
    post(http, "read/fallback", {"n": 0})
    page = watched.page()

    def no_events(route) -> None:  # type: ignore[no-untyped-def]
        # Respond like a proxy that does not support event streams.
        route.fulfill(status=200, content_type="text/plain", body="")

    page.route("**/read/fallback?*live=sse*", no_events)
    pages = Pages(page, ui.url)
    pages.open_stream("read/fallback")
    expect(page.locator("#reader-status")).to_contain_text("live over long-poll")
    post(http, "read/fallback", {"n": 1})
    pages.loaded(2)


def test_pages_until_the_tail(own_server: Starter, watched: Watched) -> None:
    server = own_server(DS_REGISTRY__ENABLED="true", DS_LIMITS__MAX_CHUNK_BYTES="2000")
    with httpx.Client(base_url=server.url) as http:
        put(http, "read/paged")
        for start in range(0, 500, 50):
            post(http, "read/paged", [{"n": number, "fill": "x" * 40} for number in range(start, start + 50)])
        asked: list[str] = []
        page = watched.page()
        page.on("request", lambda request: asked.append(request.url))
        ui = Pages(page, server.url)
        ui.open_stream("read/paged", "?from=-1")
        ui.reader("live")
        ui.loaded(500)
        assert sum("read/paged?offset=" in url and "live" not in url for url in asked) > 10


def test_a_closed_stream_is_read_to_its_end(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/closed")
    post(http, "read/closed", {"n": 0})
    ui.open_stream("read/closed")
    ui.reader("live")
    http.post("/v1/stream/read/closed", headers={"Stream-Closed": "true"})
    ui.reader("ended")
    expect(ui.page.locator("#stream-badges")).to_contain_text("closed")
    expect(ui.page.locator("#action-append")).to_be_disabled()


def test_pause_and_resume(watched: Watched, ui: Pages, http: httpx.Client) -> None:
    put(http, "read/pause")
    ui.open_stream("read/pause")
    ui.reader("live")
    ui.press("pause")
    ui.reader("paused")
    post(http, "read/pause", {"n": 0})
    # Another page shows the message, so it was delivered, and this page did not read it.
    other = Pages(watched.page(), ui.url)
    other.open_stream("read/pause")
    other.loaded(1)
    ui.loaded(0)
    ui.page.keyboard.press("p")
    ui.loaded(1)
    ui.reader("live")


def test_follow_stays_at_the_newest_message_until_the_user_scrolls_up(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/follow")
    post(http, "read/follow", [{"n": number} for number in range(200)])
    ui.open_stream("read/follow", "?from=-1")
    ui.loaded(200)
    expect(ui.page.locator("#messages [data-index='199']")).to_be_visible()
    post(http, "read/follow", {"n": 200})
    expect(ui.page.locator("#messages [data-index='200']")).to_be_visible()
    ui.page.locator("#messages").hover()
    ui.page.mouse.wheel(0, -3000)
    expect(ui.page.locator("#follow")).to_have_attribute("aria-pressed", "false")
    expect(ui.page.locator("#messages [data-index='200']")).to_have_count(0)
    post(http, "read/follow", {"n": 201})
    ui.loaded(202)
    expect(ui.page.locator("#messages [data-index='201']")).to_have_count(0)
    ui.page.keyboard.press("f")
    expect(ui.page.locator("#messages [data-index='201']")).to_be_visible()
    ui.page.set_viewport_size({"width": 1120, "height": 700})
    ui.page.keyboard.press("a")
    expect(ui.page.locator("#append-body")).to_be_visible()
    expect(ui.page.locator("#messages [data-index='201']")).to_be_in_viewport()  # even in a smaller window


def test_offsets_are_shown_and_can_be_read_from(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/offsets")
    ends = [post(http, "read/offsets", {"n": number}) for number in range(3)]
    ui.open_stream("read/offsets")
    ui.loaded(3)
    expect(ui.page.locator("#next-offset")).to_have_attribute("title", f"Stream-Next-Offset: {ends[2]}")
    ui.messages.nth(1).click()
    expect(ui.page.locator("#detail")).to_contain_text(ends[0])
    expect(ui.page.locator("#detail")).to_contain_text(ends[1])
    ui.page.locator("#detail").get_by_role("button", name="Read from here").click()
    ui.loaded(1)
    expect(ui.messages).to_contain_text(['{"n": 2}'])


def test_a_message_as_tree_text_and_hex(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/views")
    post(http, "read/views", '{"id":9007199254740993,"list":[1.0,{"deep":[true,null]}],"text":"a\\nb"}')
    ui.open_stream("read/views")
    ui.messages.first.click()
    body = ui.page.locator("#detail-body")
    expect(body.locator(".json-number").first).to_have_text("9007199254740993")
    expect(body).to_contain_text("1.0")
    body.locator("summary", has_text="{1 entry}").click()
    lists = body.locator("summary", has_text="[2 entries]")
    expect(lists).to_have_count(2)
    lists.last.click()
    expect(body.locator(".json-word")).to_have_text(["true", "null"])
    ui.page.locator("#detail").get_by_role("button", name="text").click()
    expect(body).to_contain_text('"id": 9007199254740993')
    ui.page.locator("#detail").get_by_role("button", name="hex").click()
    expect(body).to_contain_text("7b 22 69 64 22 3a 39 30")
    ui.page.keyboard.press("Escape")
    expect(ui.page.locator("#detail")).to_be_hidden()


def test_bytes_are_shown_as_hex(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/bytes", BYTES)
    post(http, "read/bytes", bytes(range(16)), BYTES)
    ui.open_stream("read/bytes")
    ui.loaded(1)
    post(http, "read/bytes", b"\xff\xfe live", BYTES)
    ui.loaded(2)
    ui.shows("00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f  ................", "ff fe 20 6c 69 76 65  .. live")
    ui.page.locator("#view").select_option("text")
    expect(ui.messages.nth(1)).to_contain_text("live")


def test_search_finds_text_in_loaded_messages(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/search")
    post(http, "read/search", [{"word": word} for word in ("alpha", "beta", "alphabet", "gamma")])
    ui.open_stream("read/search")
    ui.loaded(4)
    ui.page.keyboard.press("s")
    ui.page.keyboard.type("ALPHA")
    expect(ui.page.locator("#found")).to_have_text("2 found of 4 loaded")
    expect(ui.page.locator("#messages mark")).to_have_text(["alpha", "alpha"])
    post(http, "read/search", [{"word": "alphanumeric"}, {"word": "other"}])
    expect(ui.page.locator("#found")).to_have_text("3 found of 6 loaded")
    ui.page.locator("#search").fill("")
    expect(ui.messages).to_have_count(6)


def pixels(page: Page) -> int:
    """The number of painted pixels of the plot."""
    painted = page.evaluate(
        """() => { const canvas = document.querySelector('canvas.plot');
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        let painted = 0; for (let at = 3; at < data.length; at += 4) if (data[at]) painted += 1; return painted; }"""
    )
    assert isinstance(painted, int)
    return painted


def test_rate_and_time_to_deliver_are_plotted(watched: Watched, ui: Pages, http: httpx.Client) -> None:
    watched.allow("getImageData")  # used by this test to read the plot
    put(http, "read/plot")
    ui.open_stream("read/plot")
    ui.reader("live")
    before = pixels(ui.page)
    stop = threading.Event()

    def write() -> None:
        with httpx.Client(base_url=ui.url) as own:
            while not stop.wait(0.1):
                post(own, "read/plot", [{"at": time.time_ns() // 1_000_000, "n": number} for number in range(10)])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        expect(ui.page.locator("#rates")).to_contain_text("median of")
        expect(ui.page.locator("#rates")).to_have_text(re.compile(r"^[1-9][0-9.]* messages/s"))
        wait_until(lambda: pixels(ui.page), lambda painted: painted > before + 200, what="pixels of the plot")
    finally:
        stop.set()
        writer.join()


def test_own_appends_are_timed(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/timed", TEXT)
    ui.open_stream("read/timed")
    ui.reader("live")
    ui.page.keyboard.press("a")
    ui.append("no clock in this")
    expect(ui.page.locator("#rates")).to_contain_text("(median of 1)")


def test_a_hundred_thousand_messages_stay_smooth(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/many")
    for start in range(0, MANY, 10_000):
        post(
            http,
            "read/many",
            json.dumps([{"n": number, "text": f"message {number}"} for number in range(start, start + 10_000)]),
        )
    ui.open_stream("read/many", "?from=-1")
    expect(ui.page.locator("#reader-status")).to_have_attribute("data-loaded", str(MANY), timeout=60_000)
    assert ui.messages.count() < 80, "only visible rows exist"
    ui.page.locator("#messages").focus()
    # The work for a frame is bounded: time would measure a shared machine without a graphics card.
    rows_made, rows_shown = ui.page.evaluate(
        """async () => { const list = document.querySelector('#messages'); let made = 0, shown = 0, step_made = 0;
        const watch = new MutationObserver((changes) => { for (const change of changes)
            step_made += change.addedNodes.length; });
        watch.observe(list, { childList: true, subtree: true });
        for (let step = 0; step <= 60; step += 1) {
            step_made = 0;
            list.scrollTop = (list.scrollHeight * step) / 60;
            await new Promise(requestAnimationFrame);
            await new Promise(requestAnimationFrame);
            made = Math.max(made, step_made);
            shown = Math.max(shown, list.querySelectorAll('[data-index]').length); }
        watch.disconnect();
        return [made, shown]; }"""
    )
    assert 0 < rows_shown < 80, "only visible rows exist while the list moves"
    assert 0 < rows_made < ROW_PARTS_MAX, f"one step made {rows_made} elements"
    ui.page.locator("#search").fill('"message 99999"')
    expect(ui.page.locator("#found")).to_contain_text("1 found")
    ui.messages.first.click()
    expect(ui.page.locator("#detail")).to_contain_text("99999")


def test_number_of_loaded_messages_is_limited_until_more_are_requested(own_server: Starter, watched: Watched) -> None:
    server = own_server(DS_LIMITS__MAX_STREAM_BYTES="0", DS_LIMITS__MAX_CHUNK_BYTES="200000")
    with httpx.Client(base_url=server.url) as http:
        put(http, "read/held")
        for start in range(0, 150_000, 30_000):
            post(http, "read/held", json.dumps(list(range(start, start + 30_000)), separators=(",", ":")))
        ui = Pages(watched.page(), server.url)
        ui.open_stream("read/held", "?from=-1")
        expect(ui.page.locator("#reader-status")).to_have_attribute("data-state", "held", timeout=60_000)
        assert 100_000 <= int(ui.page.locator("#reader-status").get_attribute("data-loaded") or 0) < 150_000
        ui.page.get_by_role("button", name="Load 100,000 more").click()
        ui.reader("live")
        ui.loaded(150_000)


def test_unusual_json_is_shown(ui: Pages, http: httpx.Client) -> None:
    put(http, "read/odd", JSON)
    post(http, "read/odd", '[ {"a" : [ ] } , "" , 0 , null , "\\u0000\\u2028" ]')
    ui.open_stream("read/odd")
    ui.loaded(5)
    expect(ui.messages).to_have_count(5)
