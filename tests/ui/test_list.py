"""The list of streams: live updates, filter, typed paths, badges, 100,000 streams."""

from __future__ import annotations

import json
import re

import httpx
from playwright.sync_api import expect

from tests.ui.conftest import Starter, Watched
from tests.ui.pages import JSON, TEXT, Pages, post, put

MANY = 100_000


def test_list_is_updated_automatically(ui: Pages, http: httpx.Client) -> None:
    expect(ui.page.locator("#connection")).to_have_attribute("data-state", "live")
    put(http, "list/comes")
    ui.page.locator("#filter").fill("list/comes")
    expect(ui.stream("list/comes")).to_be_visible()
    http.delete("/v1/stream/list/comes")
    expect(ui.stream("list/comes")).to_have_count(0)


def test_row_shows_type_closure_lifetime_size_and_last_write(ui: Pages, http: httpx.Client) -> None:
    put(http, "list/badges", {"Content-Type": "text/plain", "Stream-TTL": "3600"})
    post(http, "list/badges", "x" * 2500, TEXT)
    http.post("/v1/stream/list/badges", headers={"Stream-Closed": "true"})
    ui.page.locator("#filter").fill("list/badges")
    row = ui.stream("list/badges")
    for text in ("text", "closed", "TTL 1 h", "1 message", "2.5 KB"):
        expect(row.locator(".badges")).to_contain_text(text)
    expect(row.locator(".badge[title^='Last write']")).to_have_count(1)


def test_filter_accepts_several_words(ui: Pages, http: httpx.Client) -> None:
    for name in ("fruit/apple-red", "fruit/apple-green", "fruit/pear-green"):
        put(http, name)
    ui.page.locator("#filter").fill("fruit green APPLE")
    expect(ui.stream("fruit/apple-green")).to_be_visible()
    expect(ui.stream("fruit/pear-green")).to_have_count(0)
    expect(ui.page.locator("#stream-count")).to_contain_text("1 of")


def test_a_path_can_be_typed(ui: Pages, http: httpx.Client) -> None:
    for number, spelling in enumerate(("{path}", "/v1/stream/{path}", "{url}/v1/stream/{path}?offset=-1")):
        path = f"typed/path-{number}"
        http.put(f"/v1/stream/{path}", headers=JSON)
        ui.page.locator("#filter").fill(spelling.format(url=ui.url, path=path))
        ui.page.locator("#filter").press("Enter")
        expect(ui.page.locator("#stream-title")).to_have_text(path)


def test_a_path_in_a_bucket_can_be_typed(ui: Pages, http: httpx.Client) -> None:
    http.put("/ds/typed-bucket")
    http.put("/ds/typed-bucket/one", headers=JSON)
    ui.page.locator("#filter").fill("/ds/typed-bucket/one")
    ui.page.locator("#filter").press("Enter")
    expect(ui.page.locator("#stream-title")).to_have_text("typed-bucket/one")


def test_missing_stream_can_be_created(ui: Pages) -> None:
    ui.open("#/stream/not/there")
    expect(ui.page.locator("#missing")).to_contain_text("This stream does not exist")
    ui.page.get_by_role("button", name="Create it").click()
    expect(ui.page.locator("#create-name")).to_have_value("not/there")


def test_list_can_be_used_with_the_keyboard(ui: Pages, http: httpx.Client) -> None:
    for name in ("keys/a", "keys/b", "keys/c"):
        put(http, name)
    ui.page.keyboard.press("/")
    ui.page.keyboard.type("keys/")
    expect(ui.stream("keys/c")).to_be_visible()
    ui.page.keyboard.press("ArrowDown")
    ui.page.keyboard.press("ArrowDown")
    ui.page.keyboard.press("j")
    ui.page.keyboard.press("k")
    ui.page.keyboard.press("Enter")
    expect(ui.page.locator("#stream-title")).to_have_text("keys/b")


def test_a_server_without_a_registry_is_listed(own_server: Starter, watched: Watched) -> None:
    server = own_server(DS_REGISTRY__ENABLED="false")
    ui = Pages(watched.page(), server.url)
    ui.open()
    expect(ui.page.locator("#no-streams")).to_contain_text("No streams yet")
    with httpx.Client(base_url=server.url) as http:
        put(http, "plain/one")
        expect(ui.stream("plain/one")).to_be_visible()
        expect(ui.page.locator("#no-streams")).to_be_hidden()
        post(http, "plain/one", [1, 2, 3])
        expect(ui.stream("plain/one")).to_contain_text("3 messages")
        http.delete("/v1/stream/plain/one")
        expect(ui.page.locator("#no-streams")).to_be_visible()


def test_a_server_that_cannot_list_is_explained(own_server: Starter, watched: Watched) -> None:
    page = watched.page()
    page.route("**/v1/stream/__ds/streams*", lambda route: route.fulfill(status=404, body=""))
    ui = Pages(page, own_server(DS_REGISTRY__ENABLED="false").url)
    ui.open()
    expect(page.locator("#side .notice")).to_contain_text("cannot list its streams")


def test_folders_open_and_close(ui: Pages, http: httpx.Client) -> None:
    for name in ("tree/a/one", "tree/a/two", "tree/b"):
        put(http, name)
    ui.press("folders")
    folder = ui.page.locator("#streams .folder[title='tree/']")
    expect(folder).to_contain_text("3 streams")
    expect(ui.stream("tree/b")).to_have_count(0)
    folder.click()
    expect(ui.stream("tree/b")).to_have_text(re.compile("^b"))
    ui.page.locator("#streams .folder[title='tree/a/']").click()
    ui.stream("tree/a/two").click()
    expect(ui.page.locator("#stream-title")).to_have_text("tree/a/two")
    ui.page.reload()
    expect(ui.page.locator("#streams .folder[title='tree/']")).to_be_visible()
    folder.click()
    expect(ui.stream("tree/b")).to_be_visible()


def test_streams_are_ordered_by_name_creation_or_last_write(ui: Pages, http: httpx.Client) -> None:
    for name in ("order/b", "order/c", "order/a"):
        put(http, name)
    post(http, "order/b", 1)
    ui.page.locator("#filter").fill("order/")
    rows = ui.page.locator("#streams [title^='order/'] .name")
    expect(rows).to_have_text(["order/a", "order/b", "order/c"])
    ui.page.locator("#order").select_option("newest")
    expect(rows).to_have_text(["order/a", "order/c", "order/b"])
    ui.page.locator("#order").select_option("written")
    expect(rows.first).to_have_text("order/b")


def test_a_hundred_thousand_streams(own_server: Starter, watched: Watched) -> None:
    """The registry is a stream like any other, so a test can quickly write any number of entries to it."""
    server = own_server(DS_REGISTRY__ENABLED="false", DS_LIMITS__MAX_STREAM_BYTES="0")
    with httpx.Client(base_url=server.url, timeout=60) as http:
        put(http, "__registry__")
        for start in range(0, MANY, 5000):
            events = [
                {
                    "type": "stream",
                    "key": f"many/{number:06}",
                    "value": {"path": f"many/{number:06}", "contentType": "text/plain", "createdAt": 1},
                    "headers": {"operation": "insert"},
                }
                for number in range(start, start + 5000)
            ]
            post(http, "__registry__", json.dumps(events))
        put(http, "many/099999", TEXT)
        page = watched.page()
        # A server with a registry and without the listing.
        page.route("**/v1/stream/__ds/streams*", lambda route: route.fulfill(status=404, body=""))
        ui = Pages(page, server.url)
        ui.open()
        expect(ui.page.locator("#stream-count")).to_have_text("100,000 streams", timeout=60_000)
        assert ui.streams.count() < 60, "only visible rows exist"

        ui.page.locator("#streams").focus()
        ui.page.keyboard.press("End")
        expect(ui.stream("many/099999")).to_be_visible()
        ui.page.locator("#filter").fill("0777")
        expect(ui.page.locator("#stream-count")).to_contain_text("of 100,000")
        expect(ui.stream("many/007770")).to_be_visible()
        assert ui.streams.count() < 60, "the filter made only visible rows"

        event = {"type": "stream", "key": "many/000000", "headers": {"operation": "delete"}}
        post(http, "__registry__", [event])
        ui.page.locator("#filter").fill("")
        expect(ui.page.locator("#stream-count")).to_have_text("99,999 streams")
