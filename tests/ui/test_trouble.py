"""Problems: the server restarts, streams contain hostile content, tokens are required."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import httpx
from playwright.sync_api import expect

from tests.ports import free_port
from tests.serving import serve
from tests.ui.conftest import Starter, Watched
from tests.ui.pages import BYTES, JSON, TEXT, Pages, post, put
from tests.ui.token_proxy import TOKEN, token_proxy

CONNECTION_LOST = (
    "ERR_CONNECTION_(REFUSED|RESET)|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_EMPTY_RESPONSE|ERR_SOCKET_NOT_CONNECTED"
)
"""Chromium's errors for a stopped server."""

HOSTILE = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 2'>",
    "<svg onload=window.pwned=3>",
    "</textarea></pre></title><script>window.pwned=4</script>",
    "javascript:window.pwned=5",
    "${window.pwned=6}{{window.pwned=6}}",
    '"><iframe srcdoc="<script>parent.pwned=7</script>">',
    "\u202egnp.exe\u202c \u0000\u0007\u001b[31mred",
    "__proto__",
    "<" * 3000,
)


def test_page_reconnects_to_a_restarted_server(watched: Watched, tmp_path: Path) -> None:
    watched.allow(CONNECTION_LOST)
    start = partial(serve, directory=tmp_path, DS_REGISTRY__ENABLED="true", DS_STORAGE__MODE="file-durable")
    port = free_port()
    with start(port=port) as first:
        with httpx.Client(base_url=first.url) as http:
            put(http, "trouble/restart")
            post(http, "trouble/restart", [{"n": 0}, {"n": 1}])
        ui = Pages(watched.page(), first.url)
        ui.open_stream("trouble/restart")
        ui.reader("live")
        ui.loaded(2)
        first.kill()
    ui.reader("reconnecting")
    expect(ui.page.locator("#connection")).to_have_attribute("data-state", "reconnecting")
    with start(port=port) as second:
        with httpx.Client(base_url=second.url) as http:
            post(http, "trouble/restart", {"n": 2})
            put(http, "trouble/new")
        ui.reader("live")
        ui.loaded(3)
        ui.shows('{"n": 0}', '{"n": 1}', '{"n": 2}')  # nothing is lost or duplicated
        expect(ui.page.locator("#connection")).to_have_attribute("data-state", "live")
        ui.page.locator("#filter").fill("trouble/")
        expect(ui.stream("trouble/new")).to_be_visible()
        ui.page.close()


def test_server_that_lost_its_data_is_recognised(watched: Watched) -> None:
    watched.allow(CONNECTION_LOST)
    start = partial(serve, DS_REGISTRY__ENABLED="true", DS_STORAGE__MODE="memory")
    port = free_port()
    with start(port=port) as first:
        with httpx.Client(base_url=first.url) as http:
            for number in range(3):
                put(http, f"trouble/forgotten-{number}")
        ui = Pages(watched.page(), first.url)
        ui.open_stream("trouble/forgotten-0")
        ui.reader("live")
        expect(ui.page.locator("#stream-count")).to_have_text("3 streams")
        first.kill()
    ui.reader("reconnecting")
    with start(port=port):
        ui.reader("failed")
        expect(ui.page.locator("#reader-notice")).to_contain_text("404")
        expect(ui.page.locator("#stream-count")).to_have_text("0 streams")
        ui.page.close()


def assert_inert(ui: Pages) -> None:
    assert ui.page.evaluate("window.pwned") is None
    assert ui.page.locator("#main script, #main iframe, #main img, #main svg[onload]").count() == 0


def test_hostile_content_is_shown_as_text(ui: Pages, http: httpx.Client) -> None:
    for headers in (JSON, TEXT, BYTES, {"Content-Type": "text/html"}):
        check_hostile_content(ui, http, headers)
        ui.page.locator("#search").fill("")


def check_hostile_content(ui: Pages, http: httpx.Client, headers: dict[str, str]) -> None:
    name = f"hostile/{headers['Content-Type'].replace('/', '-')}"
    put(http, name, headers)
    bodies = [json.dumps({text: text}) if headers is JSON else text.encode() for text in HOSTILE]
    for body in bodies[:5]:
        post(http, name, body, headers)
    ui.open_stream(name)
    ui.loaded(5)
    for body in bodies[5:]:
        post(http, name, body, headers)
    ui.loaded(10)
    ui.page.locator("#view").select_option("text")
    expect(ui.messages.first).to_contain_text("<script>window.pwned = 1</script>")
    for mode in ("json", "text", "hex"):
        ui.page.locator("#view").select_option(mode)
        for index in range(10):
            ui.messages.nth(index).click()
            expect(ui.page.locator("#detail-body")).to_be_visible()
    ui.page.locator("#view").select_option("text")
    ui.page.locator("#search").fill("<script>")
    expect(ui.page.locator("#messages mark").first).to_have_text("<script>")
    assert_inert(ui)


def test_hostile_names_types_and_state_are_shown_as_text(ui: Pages, http: httpx.Client) -> None:
    name = "hostile/<img src=x onerror=window.pwned=8>"
    http.put("/v1/stream/hostile/%3Cimg%20src=x%20onerror=window.pwned=8%3E", headers=JSON)
    events = [{"type": text, "key": text, "operation": "set", "value": {text: text}} for text in HOSTILE]
    post(http, name, events)
    ui.open_stream(name, "?tab=state")
    expect(ui.page.locator("#state-types .tab")).to_have_count(len(HOSTILE))
    ui.page.locator("#state-types .tab").first.click()
    ui.page.locator("#entities [data-index]").first.click()
    ui.page.locator("#filter").fill("hostile/<img")
    expect(ui.page.locator("#streams [data-index]").first).to_contain_text("<img src=x")
    assert_inert(ui)


def test_page_stored_in_a_stream_cannot_run_scripts(watched: Watched, ui: Pages, http: httpx.Client) -> None:
    watched.allow("Blocked script execution|violates the following Content Security Policy|sandboxed")
    put(http, "hostile/page", {"Content-Type": "text/html"})
    post(
        http,
        "hostile/page",
        "<title>before</title><script>document.title='ran'</script>",
        {"Content-Type": "text/html"},
    )
    page = watched.page()
    page.goto(f"{ui.url}/v1/stream/hostile/page")
    assert page.title() == "before"
    assert page.evaluate("self.origin") == "null", "it does not belong to the server's origin"


def test_content_security_policy_blocks_injected_scripts(watched: Watched, ui: Pages) -> None:
    watched.allow("Content Security Policy|TrustedHTML|TrustedScript|Trusted Type")
    refused = ui.page.evaluate(
        """() => { const tried = {};
        try { document.body.innerHTML = '<img src=x>'; tried.markup = 'done'; } catch (e) { tried.markup = e.name; }
        const script = document.createElement('script');
        try { script.textContent = 'window.pwned = 9'; document.body.append(script); } catch (e) { /* as wished */ }
        return tried; }"""
    )
    assert refused["markup"] == "TypeError"
    assert ui.page.evaluate("window.pwned") is None


def test_token_is_requested_sent_and_forgotten(own_server: Starter, watched: Watched) -> None:
    server = own_server(DS_REGISTRY__ENABLED="true")
    with token_proxy(server.url) as guarded, httpx.Client(base_url=server.url) as http:
        put(http, "guarded/one")
        post(http, "guarded/one", {"n": 0})
        # The page is loaded from the server itself and uses the proxy, which is another origin, as with Envoy.
        ui = Pages(watched.page(), server.url)
        ui.open_stream("guarded/one")
        ui.loaded(1)
        ui.press("connection")
        ui.page.locator("#base-url").fill("ftp://nowhere")
        ui.press("connect")
        expect(ui.page.locator("dialog .problem")).to_contain_text("http://")
        ui.page.locator("#base-url").fill(guarded)
        ui.press("connect")
        expect(ui.page.locator("#missing")).to_contain_text("401")
        expect(ui.page.locator("#side .notice")).to_contain_text("requires a token")
        ui.page.get_by_role("button", name="Enter a token").click()
        ui.page.locator("#token").fill(TOKEN)
        ui.press("connect")
        ui.reader("live")
        ui.loaded(1)
        expect(ui.page.locator("#connection")).to_have_attribute("data-state", "live")
        post(http, "guarded/one", {"n": 1})
        ui.loaded(2)
        read = ui.copied(ui.page.get_by_role("button", name="Copy this read as curl"))
        assert "$DS_TOKEN" in read
        assert TOKEN not in read
        kept = ui.page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
        assert TOKEN not in kept
        ui.page.reload()
        expect(ui.page.locator("#missing")).to_contain_text("401")
        ui.press("connection")
        ui.page.locator("#token").fill(TOKEN)
        ui.page.locator("#keep-token").check()
        ui.press("connect")
        ui.reader("live")
        ui.page.reload()
        ui.reader("live")
        assert TOKEN not in ui.page.evaluate("JSON.stringify({...localStorage})")
        ui.page.close()


def test_a_token_can_be_pasted_on_the_first_page(own_server: Starter, watched: Watched) -> None:
    server = own_server(DS_AUTH__TOKEN=TOKEN)
    ui = Pages(watched.page(), server.url)
    ui.open()
    card = ui.page.locator("#token-card")
    expect(card).to_contain_text("headwater token --scope streams:admin")
    card.evaluate("""card => {
        window.timesHidden = 0;
        new MutationObserver(() => { window.timesHidden += card.hidden; }).observe(card, {attributes: true});
    }""")
    for _ in range(2):
        with ui.page.expect_response(lambda response: "__ds/streams" in response.url):
            pass
    assert ui.page.evaluate("window.timesHidden") == 0, "the form disappears while the page retries"
    ui.page.locator("#home-token").fill(TOKEN)
    ui.press("home-connect")
    expect(ui.page.locator("#connection")).to_have_attribute("data-state", "live")
    expect(ui.page.locator("#token-card")).to_be_hidden()
    ui.page.close()


def test_token_in_a_link_is_used_and_removed_from_the_address(own_server: Starter, watched: Watched) -> None:
    server = own_server(DS_AUTH__TOKEN=TOKEN)
    ui = Pages(watched.page(), server.url)
    ui.open(f"#/?token={TOKEN}")
    expect(ui.page.locator("#connection")).to_have_attribute("data-state", "live")
    expect(ui.page).not_to_have_url(re.compile(TOKEN))
    ui.page.close()
