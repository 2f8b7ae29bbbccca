"""A server that requires a token: the page asks for it, uses it, and does not keep it unless asked to."""

from __future__ import annotations

import re

import httpx
from playwright.sync_api import expect

from tests.ui.conftest import Starter, Watched
from tests.ui.pages import Pages, post, put
from tests.ui.token_proxy import TOKEN, token_proxy


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
        expect(ui.page.locator("#token")).to_be_focused()
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
