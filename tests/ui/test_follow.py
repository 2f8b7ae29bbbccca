"""Many streams over one connection in a real browser, which has only six: the folder view, and `EventSource`."""

from __future__ import annotations

import re
from typing import Any

import httpx
from playwright.sync_api import expect

from tests.serving import Server
from tests.ui.conftest import Starter, Watched
from tests.ui.pages import TEXT, Pages, post, put
from tests.waiting import wait_until

STREAMS = 300
"""Fifty times the connections that a browser opens to one server."""
FOLLOWERS = re.compile(r'^headwater_live_readers\{[^}]*"many"[^}]*\} (\d+)', re.MULTILINE)
CONNECTIONS = re.compile(r"^headwater_connections (\d+)", re.MULTILINE)

# Collects received messages; `other` counts requests of the page while the event stream is open.
EVENT_SOURCE = """async ({ prefix, expected }) => {
  const body = JSON.stringify({ prefix, start: 'now' });
  const headers = { 'Content-Type': 'application/json' };
  const session = await (await fetch('/v1/stream/__ds/follow', { method: 'POST', headers, body })).json();
  const seen = {};
  let opened = 0;
  const events = new EventSource(session.url);
  const done = new Promise((resolve) => events.addEventListener('data', (event) => {
    const { stream, messages } = JSON.parse(event.data);
    (seen[stream] ??= []).push(...messages);
    if (Object.values(seen).flat().length >= expected) resolve();
  }));
  events.addEventListener('open', () => { opened += 1; });
  window.ended = new Promise((resolve) => events.addEventListener('error', resolve, { once: true })).then(() => true);
  window.listed = new Promise((resolve) => events.addEventListener('control', resolve, { once: true }));
  window.following = done.then(async () => {
    const other = await Promise.all(Array.from({ length: 20 }, () => fetch('/v1/stream/' + prefix + '0?offset=-1')));
    events.close();
    return { seen, opened, other: other.filter((response) => response.ok).length };
  });
  await window.listed;
}"""


def _number(http: httpx.Client, pattern: re.Pattern[str]) -> int:
    found = pattern.search(http.get("/metrics").text)
    assert found is not None
    return int(found[1])


def test_messages_of_a_folder_arrive_over_one_connection(ui: Pages, http: httpx.Client, ui_server: Server) -> None:
    for number in range(STREAMS):
        put(http, f"folder/{number}", body='["old"]')
    page = ui.page
    ui.open("#/")
    page.locator("#folders").click()
    page.locator("#streams .folder[title='folder/'] a", has_text="follow").click()
    status = page.locator("#folder-status")
    expect(page.locator("#folder-title")).to_have_text("folder/")
    expect(status).to_have_attribute("data-state", "live")
    # Connections of pages that were closed before may still end.
    wait_until(lambda: _number(http, FOLLOWERS), lambda found: found == 1, what="one follower")
    few = "six connections with and six without credentials, and those of this test"
    wait_until(lambda: _number(http, CONNECTIONS), lambda found: found <= 16, what=few)
    for number in range(STREAMS):
        post(http, f"folder/{number}", [f"new {number}"])
    put(http, "folder/later", TEXT, "text of a new stream")
    expect(status).to_have_attribute("data-received", str(STREAMS + 1))
    rows = page.locator("#folder-messages .message-row")
    expect(rows.last).to_contain_text("text of a new stream")
    expect(rows.last.locator("a")).to_have_text("folder/later")

    page.locator("#folder-pause").click()
    expect(status).to_have_attribute("data-state", "paused")
    post(http, "folder/7", ["while paused"])
    page.locator("#folder-pause").click()
    expect(rows.last).to_contain_text("while paused")
    expect(status).to_have_attribute("data-received", str(STREAMS + 2))
    rows.last.locator("a").click()
    expect(page.locator("#stream-title")).to_have_text("folder/7")


def test_an_event_source_follows_hundreds_of_streams_through_reconnects(own_server: Starter, watched: Watched) -> None:
    """The server ends each response after half a second; the browser reconnects automatically with `Last-Event-ID`."""
    watched.allow("net::ERR_INCOMPLETE_CHUNKED_ENCODING")
    server = own_server(DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0.5")
    page = watched.page()
    with httpx.Client(base_url=server.url) as http:
        for number in range(STREAMS):
            put(http, f"es/{number}", body='["old"]')
        page.goto(f"{server.url}/ui/")
        page.evaluate(EVENT_SOURCE, {"prefix": "es/", "expected": STREAMS * 2})
        for number in range(STREAMS):
            post(http, f"es/{number}", [0])
        page.evaluate("window.ended")
        for number in range(STREAMS):
            post(http, f"es/{number}", [1])
        found: dict[str, Any] = page.evaluate("window.following")
    assert found["seen"] == {f"es/{number}": [0, 1] for number in range(STREAMS)}
    assert found["opened"] >= 2, "it has reconnected"
    assert found["other"] == 20, "the other connections of the browser stay free"
