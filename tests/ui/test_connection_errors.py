"""The server restarts: with its data, and without."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx
from playwright.sync_api import expect

from tests.ports import free_port
from tests.serving import serve
from tests.ui.conftest import Watched
from tests.ui.pages import Pages, post, put

CONNECTION_LOST = (
    "ERR_CONNECTION_(REFUSED|RESET)|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_EMPTY_RESPONSE|ERR_SOCKET_NOT_CONNECTED"
)
"""Chromium's errors for a stopped server."""


def test_page_reconnects_to_a_restarted_server(watched: Watched, tmp_path: Path) -> None:
    watched.allow(CONNECTION_LOST)
    start = partial(serve, directory=tmp_path, DS_REGISTRY__ENABLED="true", DS_STORAGE__MODE="file-durable")
    port = free_port()
    with start(port=port) as first:
        with httpx.Client(base_url=first.url) as http:
            put(http, "restarts/kept")
            post(http, "restarts/kept", [{"n": 0}, {"n": 1}])
        ui = Pages(watched.page(), first.url)
        ui.open_stream("restarts/kept")
        ui.reader("live")
        ui.loaded(2)
        first.kill()
    ui.reader("reconnecting")
    expect(ui.page.locator("#connection")).to_have_attribute("data-state", "reconnecting")
    with start(port=port) as second:
        with httpx.Client(base_url=second.url) as http:
            post(http, "restarts/kept", {"n": 2})
            put(http, "restarts/new")
        ui.reader("live")
        ui.loaded(3)
        ui.shows('{"n": 0}', '{"n": 1}', '{"n": 2}')  # nothing is lost or duplicated
        expect(ui.page.locator("#connection")).to_have_attribute("data-state", "live")
        ui.page.locator("#filter").fill("restarts/")
        expect(ui.stream("restarts/new")).to_be_visible()
        ui.page.close()


def test_server_that_lost_its_data_is_recognised(watched: Watched) -> None:
    watched.allow(CONNECTION_LOST)
    start = partial(serve, DS_REGISTRY__ENABLED="true", DS_STORAGE__MODE="memory")
    port = free_port()
    with start(port=port) as first:
        with httpx.Client(base_url=first.url) as http:
            for number in range(3):
                put(http, f"restarts/forgotten-{number}")
        ui = Pages(watched.page(), first.url)
        ui.open_stream("restarts/forgotten-0")
        ui.reader("live")
        expect(ui.page.locator("#stream-count")).to_have_text("3 streams")
        first.kill()
    ui.reader("reconnecting")
    with start(port=port):
        ui.reader("failed")
        expect(ui.page.locator("#reader-notice")).to_contain_text("404")
        expect(ui.page.locator("#stream-count")).to_have_text("0 streams")
        ui.page.close()
