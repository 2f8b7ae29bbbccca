"""Hostile content, names and types are shown as text, and scripts from streams do not run."""

from __future__ import annotations

import json

import httpx
from playwright.sync_api import expect

from tests.ui.conftest import Watched
from tests.ui.pages import BYTES, JSON, TEXT, Pages, post, put

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
