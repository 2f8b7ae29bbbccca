"""State and session streams as tables, subscriptions with their offsets, and the pipeline page."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
from playwright.sync_api import expect

from tests.ui.conftest import Starter, Watched
from tests.ui.pages import JSON, Pages, post, put
from tests.waiting import wait_until


def session(kind: str, key: str, operation: str, value: Any = None) -> dict[str, Any]:
    event = {"type": kind, "key": key, "operation": operation}
    return event if value is None else event | {"value": value}


def test_a_session_is_folded_live_into_a_table_per_type(ui: Pages, http: httpx.Client) -> None:
    put(http, "state/session")
    post(
        http,
        "state/session",
        [
            session("presence", "user:alice", "set", {"status": "online", "device": "web"}),
            session("presence", "user:bob", "set", {"status": "away", "device": "phone"}),
            session("chunk", "msg:1", "append", {"text": "Hel"}),
        ],
    )
    ui.open_stream("state/session", "?tab=state")
    types = ui.page.locator("#state-types .tab")
    expect(types).to_have_text(["chunk 1", "presence 2"])
    types.nth(1).click()
    rows = ui.page.locator("#entities [data-index]")
    expect(rows).to_contain_text(["user:alice", "user:bob"])
    expect(rows.nth(0)).to_contain_text("online")
    expect(rows.nth(0)).to_contain_text(re.compile("just now|ago$"))  # the time of arrival, which history has too
    post(
        http,
        "state/session",
        [
            session("presence", "user:bob", "remove"),
            session("presence", "user:alice", "set", {"status": "busy"}),
            session("chunk", "msg:1", "append", {"text": "lo"}),
        ],
    )
    expect(rows).to_have_count(1)
    expect(rows.nth(0)).to_contain_text("busy")
    types.nth(0).click()
    expect(rows.nth(0)).to_contain_text("Hello")
    rows.nth(0).click()
    expect(ui.page.locator("#entity")).to_contain_text('"Hello"')
    ui.page.locator("#state-search").fill("nothing like it")
    expect(rows).to_have_count(0)


def test_the_registry_is_a_state_stream(ui: Pages, http: httpx.Client) -> None:
    put(http, "state/listed")
    ui.open_stream("__registry__", "?tab=state")
    ui.page.locator("#state-search").fill("state/listed")
    expect(ui.page.locator("#entities [data-key='state/listed']")).to_contain_text("application/json")
    expect(ui.page.locator("#action-append")).to_be_disabled()
    expect(ui.page.locator("#action-delete")).to_be_disabled()


def test_malformed_state_is_marked(ui: Pages, http: httpx.Client) -> None:
    put(http, "state/none")
    post(http, "state/none", [1, {"a": 1}])
    ui.open_stream("state/none", "?tab=state")
    expect(ui.page.locator(".notice:visible")).to_contain_text("This stream has no state events")


def test_a_subscription_with_its_cursors_and_lag(ui: Pages, http: httpx.Client) -> None:
    put(http, "jobs/a")
    put(http, "jobs-wake")
    ui.open("#/subscriptions")
    ui.press("subscription-new")
    ui.page.locator("#sub-id").fill("ui-workers")
    ui.page.locator("#sub-pattern").fill("jobs/*")
    ui.page.locator("#sub-wake").fill("jobs-wake")
    ui.submit()
    cursor = ui.page.locator("#cursors tr[data-stream='jobs/a']")
    expect(cursor).to_contain_text("up to date")
    post(http, "jobs/a", [1, 2, 3])
    expect(cursor).to_contain_text("3 behind")

    answer = ui.page.locator("#worker-answer .answer")
    ui.press("claim")
    expect(answer).to_have_attribute("data-status", "200")
    ui.press("claim")
    expect(answer).to_contain_text("ALREADY_CLAIMED")
    ui.press("ack")
    expect(answer).to_contain_text('"ok":true')
    expect(cursor).to_contain_text("up to date")
    ui.press("release")
    expect(answer).to_contain_text("FENCED")

    put(http, "other/b")
    ui.page.locator("#link-name").fill("other/b")
    ui.press("link-add")
    linked = ui.page.locator("#cursors tr[data-stream='other/b']")
    expect(linked).to_contain_text("explicit")
    linked.get_by_role("button", name="Unlink other/b").click()
    expect(linked).to_have_count(0)

    ui.open("#/subscriptions")
    expect(ui.page.locator("#subscriptions")).to_contain_text("ui-workers")
    ui.page.locator("#subscription-id").fill("ui-workers")
    ui.press("subscription-open")
    ui.press("subscription-delete")
    ui.submit()
    expect(ui.page.locator("#subscriptions")).not_to_contain_text("ui-workers")
    assert http.get("/v1/stream/__ds/subscriptions/ui-workers").status_code == 404


def test_subscription_links_to_streams_of_buckets_and_shows_if_there_are_more(ui: Pages, http: httpx.Client) -> None:
    http.put("/ds/ui-linked")
    http.put("/ds/ui-linked/log", headers={"Content-Type": "text/plain"}, content="x").raise_for_status()
    body = {"type": "pull-wake", "pattern": "/ds/ui-linked/*", "wake_stream": "ui-linked-wake"}
    http.put("/v1/stream/__ds/subscriptions/ui-linked", json=body).raise_for_status()
    many = [f"ui-many/{number:04}" for number in range(1_000)]
    http.put("/v1/stream/__ds/subscriptions/ui-many", json=body | {"streams": many}).raise_for_status()
    ui.open("#/subscription/ui-linked")
    link = ui.page.locator("tr[data-stream='/ds/ui-linked/log'] a")
    expect(link).to_have_attribute("href", "#/bucket/ui-linked/log")
    expect(ui.page.locator("tr[data-stream='/ds/ui-linked/log']")).to_contain_text("up to date")
    ui.open("#/subscription/ui-many")
    expect(ui.page.locator("td.muted", has_text="The first 1,000 of 1,001 streams.")).to_be_visible()
    for id_ in ("ui-linked", "ui-many"):
        http.delete(f"/v1/stream/__ds/subscriptions/{id_}")


def test_rejected_webhook_shows_the_reason(ui: Pages) -> None:
    ui.open("#/subscriptions")
    ui.press("subscription-new")
    ui.page.locator("#sub-id").fill("ui-hook")
    ui.page.locator("#sub-type").select_option("webhook")
    ui.page.locator("#sub-streams").fill("a, b/c")
    ui.page.locator("#sub-url").fill("http://10.0.0.1/hook")
    ui.submit()
    expect(ui.page.locator("dialog .problem")).to_contain_text("WEBHOOK_URL_REJECTED")


def status(kind: str, key: str, **value: Any) -> dict[str, Any]:
    state = {"updated_at_ms": time.time_ns() // 1_000_000, **value}
    return {"type": kind, "key": key, "value": state, "headers": {"operation": "upsert"}}


def test_pipeline_page_works_after_old_states_were_dropped(own_server: Starter, watched: Watched) -> None:
    server = own_server()
    with httpx.Client(base_url=server.url) as http:
        put(http, "__pipeline__", {**JSON, "Stream-Retention-Bytes": "1000", "Stream-Retention-Drop": "allowed"})
        for number in range(40):
            post(http, "__pipeline__", [status("query", "copying", status="running", batch=number, batch_ms=5)])
        wait_until(lambda: "stream-earliest-offset" in http.head("/v1/stream/__pipeline__").headers)
        ui = Pages(watched.page(), server.url)
        ui.open("#/pipeline")
        expect(ui.page.locator("[data-query='copying']")).to_contain_text("39 in 5.0 ms")


def test_pipeline_page_shows_the_reported_state(own_server: Starter, watched: Watched) -> None:
    server = own_server(DS_REGISTRY__ENABLED="true")
    ui = Pages(watched.page(), server.url)
    with httpx.Client(base_url=server.url) as http:
        ui.open("#/pipeline")
        expect(ui.page.locator("#pipeline-absent")).to_contain_text("No pipeline reports")
        put(http, "__pipeline__")
        post(
            http,
            "__pipeline__",
            [
                status(
                    "query",
                    "orders-to-postgres",
                    status="running",
                    source="orders/**",
                    target="postgres",
                    batch=41,
                    batch_ms=79,
                    input_rows_per_s=1234.5,
                    lag_messages=7,
                    offsets={"orders/1": "0000000000000007_00000000000000ff"},
                ),
                status("slot", "headwater_items", database="app", lag_bytes=18211, confirmed_lsn="0/1A2B3C8"),
            ],
        )
        query = ui.page.locator("[data-query='orders-to-postgres']")
        for text in ("running", "1,235 rows/s", "41 in 79 ms", "7 messages"):
            expect(query).to_contain_text(text)
        query.locator("summary").click()
        expect(query).to_contain_text("0000000000000007_00000000000000ff")
        post(http, "__pipeline__", [status("query", "items", status="running", offsets={"lsn": "0/1A2B3C8"})])
        items = ui.page.locator("[data-query='items']")
        expect(items).to_contain_text("0/1A2B3C8")
        expect(items.locator("summary")).to_have_count(0)
        slot = ui.page.locator("[data-slot='headwater_items']")
        for text in ("18.2 KB", "0/1A2B3C8"):
            expect(slot).to_contain_text(text)
        error = {"message": "column 'value' is missing", "at_ms": time.time_ns() // 1_000_000}
        post(http, "__pipeline__", [status("query", "orders-to-postgres", status="failed", batch=42, error=error)])
        expect(ui.page.locator("#pipeline-failures")).to_contain_text("column 'value' is missing")
        expect(query).to_contain_text("failed")


def test_a_subscription_that_fails_shows_the_reason_and_the_next_attempt(ui: Pages, http: httpx.Client) -> None:
    put(http, "failing/one")
    body = {"type": "webhook", "pattern": "failing/*", "webhook": {"url": "http://127.0.0.1:1/hook"}}
    assert http.put("/v1/stream/__ds/subscriptions/failing", json=body).status_code == 201
    post(http, "failing/one", {"n": 1})
    ui.open("#/subscription/failing")
    failure = ui.page.locator("#subscription-failure")
    expect(failure).to_contain_text("failed attempt")
    expect(failure).to_contain_text("Last reason: cannot connect to 127.0.0.1:1: Connection refused")
    expect(failure).to_contain_text("ext attempt")
    ui.open("#/subscriptions")
    expect(ui.page.locator("#subscriptions")).to_contain_text("Last reason")
    http.delete("/v1/stream/__ds/subscriptions/failing")


def test_pages_without_a_pipeline_or_subscriptions_have_a_hint(own_server: Starter, watched: Watched) -> None:
    ui = Pages(watched.page(), own_server().url)
    ui.open("#/pipeline")
    expect(ui.page.locator("#pipeline-status")).to_have_text("none")
    expect(ui.page.locator("#pipeline-absent")).to_contain_text("headwater sync")
    ui.open("#/subscriptions")
    expect(ui.page.locator("#no-subscriptions")).to_contain_text("headwater subscription create")
