"""Actions on a stream: create, append, close, fork, delete, snapshots, bootstrap; each also as curl."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import httpx
from playwright.sync_api import Route, expect

from tests.ui.pages import BYTES, JSON, TEXT, Pages, post, put


def test_create_with_type_lifetime_and_first_messages(ui: Pages, http: httpx.Client) -> None:
    ui.page.keyboard.press("n")
    ui.page.locator("#create-name").fill("made/here")
    ui.page.locator("#create-type").select_option("application/json")
    ui.page.locator("#create-ttl").fill("7200")
    ui.page.locator("#create-body").fill('[{"first":1},{"second":2}]')
    ui.submit()
    expect(ui.page.locator("#stream-title")).to_have_text("made/here")
    ui.loaded(2)
    expect(ui.page.locator("#stream-badges")).to_contain_text("TTL 2 h")
    head = http.head("/v1/stream/made/here").headers
    assert head["stream-ttl"] == "7200"
    assert head["content-type"] == "application/json"


def test_create_closed_with_an_expiry_and_any_type(ui: Pages, http: httpx.Client) -> None:
    ui.press("new-stream")
    ui.page.locator("#create-name").fill("made/closed")
    ui.page.locator("#create-type").select_option("other")
    ui.page.locator("#create-other-type").fill("text/csv; charset=utf-8")
    ui.page.locator("#create-expires").fill("2030-01-02T03:04:05")
    ui.page.locator("#create-body").fill("a,b")
    ui.page.locator("#create-closed").check()
    ui.submit()
    ui.reader("ended")
    head = http.head("/v1/stream/made/closed").headers
    assert head["content-type"] == "text/csv; charset=utf-8"
    assert head["stream-closed"] == "true"
    local = datetime(2030, 1, 2, 3, 4, 5).astimezone()  # the input is in the browser's local time
    assert datetime.fromisoformat(head["stream-expires-at"]) == local.astimezone(UTC)


def test_rejected_create_shows_the_reason_and_stays_open(ui: Pages, http: httpx.Client) -> None:
    put(http, "made/twice", TEXT)
    ui.page.keyboard.press("n")
    ui.page.locator("#create-name").fill("made/twice")
    ui.submit()
    expect(ui.page.locator("dialog .problem")).to_contain_text("409")
    ui.page.locator("#create-name").fill("bad//name")
    ui.submit()
    expect(ui.page.locator("dialog .problem")).to_contain_text("400 invalid_name")
    ui.page.keyboard.press("Escape")
    expect(ui.page.locator("dialog")).to_have_count(0)


def test_append_shows_the_whole_response(ui: Pages, http: httpx.Client) -> None:
    put(http, "do/append")
    ui.open_stream("do/append")
    ui.reader("live")
    ui.press("action-append")
    answer = ui.append('{"hello":"world"}')
    expect(answer).to_have_attribute("data-status", "204")
    expect(answer).to_contain_text("stream-next-offset")
    ui.loaded(1)
    answer = ui.append("{not json")
    expect(answer).to_have_attribute("data-status", "400")
    expect(answer).to_contain_text("invalid_json")
    ui.loaded(1)


def test_producer_errors_are_explained(ui: Pages, http: httpx.Client) -> None:
    put(http, "do/producer")
    ui.open_stream("do/producer")
    ui.reader("live")
    ui.page.keyboard.press("a")
    for producer, status, meaning in (
        (("me", "0", "0"), "200", "stored once"),
        (("me", "0", "0"), "204", "Duplicate"),
        (("me", "0", "2"), "409", "the server expects sequence number 1 and received 2"),
        (("me", "0", "1"), "200", "Accepted"),
        (("me", "1", "0"), "200", "Accepted"),
        (("me", "0", "2"), "403", "a newer epoch (1)"),
        (("me", "2", "5"), "400", "must begin with sequence number 0"),
    ):
        answer = ui.append('{"n":1}', producer)
        expect(answer).to_have_attribute("data-status", status)
        expect(answer).to_contain_text(meaning)
    ui.loaded(3)
    ui.page.locator("#producer-advance").check()
    ui.append('{"n":1}', ("me", "1", "1"))
    expect(ui.page.locator("#producer-seq")).to_have_value("2")


def test_keys_pressed_while_a_stream_opens_are_not_lost(ui: Pages, http: httpx.Client) -> None:
    put(http, "do/early")
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    ui.page.route("**/v1/stream/do/early", hold, times=1)
    ui.open_stream("do/early")
    expect(ui.page.locator("#main")).to_contain_text("Opening…")
    ui.page.keyboard.press("2")
    ui.page.keyboard.press("a")
    expect(ui.page.locator("#append-body")).to_have_count(0)
    held[0].continue_()
    expect(ui.page.locator("#append-body")).to_be_focused()
    expect(ui.page.locator("#tab-state")).to_have_attribute("aria-selected", "true")


def test_back_closes_a_dialog(ui: Pages, http: httpx.Client) -> None:
    put(http, "back/one", JSON)
    ui.open("#/subscriptions")
    ui.open_stream("back/one")
    ui.page.keyboard.press("n")
    expect(ui.page.locator("dialog")).to_be_visible()
    ui.page.go_back()
    expect(ui.page.get_by_role("heading", name="Subscriptions")).to_be_visible()
    expect(ui.page.locator("dialog")).to_have_count(0)


def test_stream_seq_is_sent(ui: Pages, http: httpx.Client) -> None:
    put(http, "do/seq", TEXT)
    ui.open_stream("do/seq")
    ui.page.keyboard.press("a")
    ui.page.locator("#stream-seq").fill("5")
    expect(ui.append("x")).to_have_attribute("data-status", "204")
    ui.page.locator("#stream-seq").fill("4")
    expect(ui.append("y")).to_have_attribute("data-status", "409")


def test_bytes_are_appended_as_hex_or_from_a_file(ui: Pages, http: httpx.Client, tmp_path: Path) -> None:
    put(http, "do/bytes", BYTES)
    ui.open_stream("do/bytes")
    ui.page.keyboard.press("a")
    ui.append("00 ff 10")
    file = tmp_path / "file.bin"
    file.write_bytes(bytes(range(256)))
    ui.page.locator("#append-encoding").select_option("file")
    ui.page.locator("#append-file").set_input_files(file)
    ui.press("append-send")
    ui.loaded(2)
    assert http.get("/v1/stream/do/bytes?offset=-1").content == b"\x00\xff\x10" + bytes(range(256))


def test_close(ui: Pages, http: httpx.Client) -> None:
    put(http, "do/close")
    ui.open_stream("do/close")
    ui.reader("live")
    ui.press("action-close")
    ui.submit()
    ui.reader("ended")
    expect(ui.page.locator("#stream-badges")).to_contain_text("closed")
    assert http.head("/v1/stream/do/close").headers["stream-closed"] == "true"


def test_delete_asks_for_confirmation(ui: Pages, http: httpx.Client) -> None:
    put(http, "do/delete", JSON, "[1,2,3]")
    ui.open_stream("do/delete")
    ui.loaded(3)
    ui.press("action-delete")
    expect(ui.page.locator("dialog")).to_contain_text("its 3 messages?")
    ui.page.get_by_role("button", name="Cancel").click()
    assert http.head("/v1/stream/do/delete").status_code == 200
    ui.press("action-delete")
    ui.submit()
    expect(ui.page.locator("#stream-title")).to_have_count(0)
    assert http.head("/v1/stream/do/delete").status_code == 404


def test_fork_at_the_tail_and_at_a_message(ui: Pages, http: httpx.Client) -> None:
    put(http, "do/fork")
    ends = [post(http, "do/fork", {"n": number}) for number in range(3)]
    ui.open_stream("do/fork")
    ui.press("action-fork")
    ui.page.locator("#fork-name").fill("do/fork-whole")
    ui.submit()
    expect(ui.page.locator("#stream-title")).to_have_text("do/fork-whole")
    ui.loaded(3)
    ui.open_stream("do/fork")
    ui.messages.nth(1).click()
    ui.page.get_by_role("button", name="Fork here").click()
    expect(ui.page.locator("#fork-offset")).to_have_value(ends[1])
    ui.page.locator("#fork-name").fill("do/fork-part")
    ui.submit()
    expect(ui.page.locator("#stream-title")).to_have_text("do/fork-part")
    ui.loaded(2)
    assert http.get("/v1/stream/do/fork-part?offset=-1").json() == [{"n": 0}, {"n": 1}]


def test_snapshot_and_bootstrap(ui: Pages, http: httpx.Client) -> None:
    http.put("/ds/snap-bucket")
    http.put("/ds/snap-bucket/one", headers=JSON)
    cut = http.post("/ds/snap-bucket/one", headers=JSON, content="[1,2,3]").headers["stream-next-offset"]
    http.post("/ds/snap-bucket/one", headers=JSON, content='["four","five"]')
    ui.open("#/bucket/snap-bucket/one")
    ui.loaded(5)
    ui.press("tab-snapshots")
    expect(ui.page.locator("#snapshot-latest")).to_contain_text("None")
    ui.page.locator("#snapshot-offset").fill(cut)
    ui.page.locator("#snapshot-body").fill('{"sum":6}')
    ui.press("snapshot-publish")
    expect(ui.page.locator("#snapshot-result .answer")).to_have_attribute("data-status", "204")
    expect(ui.page.locator("#snapshot-latest")).to_contain_text('"sum": 6')
    ui.press("bootstrap")
    parts = ui.page.locator("#bootstrap-parts summary")
    expect(parts).to_have_count(3)
    expect(parts.nth(0)).to_contain_text('{"sum":6}')
    expect(parts.nth(2)).to_contain_text('"five"')
    ui.press("tab-messages")
    ui.loaded(2)
    ui.page.locator("#from").select_option("-1")
    expect(ui.page.locator("#reader-notice")).to_contain_text("410")
    expect(ui.page.locator("#reader-notice")).to_contain_text("the Snapshots tab has their state")
    ui.page.get_by_role("button", name="Read stored messages").click()
    ui.loaded(2)
    ui.press("tab-snapshots")
    ui.press("snapshot-delete")
    ui.submit()
    expect(ui.page.locator("dialog .problem")).to_contain_text("409")


def test_buckets_are_created_listed_filled_and_deleted(ui: Pages, http: httpx.Client) -> None:
    ui.open("#/buckets")
    ui.page.locator("#bucket-name").fill("no")
    ui.press("bucket-create")
    expect(ui.page.locator(".problem")).to_contain_text("400")
    ui.page.locator("#bucket-name").fill("made-bucket")
    ui.press("bucket-create")
    expect(ui.page.locator("#bucket-count")).to_have_text("0 streams")
    ui.press("bucket-new-stream")
    ui.page.locator("#create-name").fill("/ds/made-bucket/user 1")
    ui.submit()
    expect(ui.page.locator("#stream-title")).to_have_text("made-bucket/user 1")
    ui.open("#/buckets")
    expect(ui.page.locator("#buckets")).to_contain_text("made-bucket")
    http.put("/ds/seen-by-itself")
    expect(ui.page.locator("#buckets")).to_contain_text("seen-by-itself")
    ui.open("#/bucket/made-bucket")
    row = ui.page.locator("#bucket-streams [data-index]")
    expect(row).to_contain_text(["user 1"])
    http.put("/ds/made-bucket/user-2", headers=TEXT, content="1234")
    expect(row).to_contain_text(["user 1", "user-2"])
    expect(row.nth(1)).to_contain_text("4 B")
    ui.press("bucket-delete")
    ui.submit()
    expect(ui.page.locator("dialog .problem")).to_contain_text("409")
    ui.page.keyboard.press("Escape")
    for name in ("user 1", "user-2"):
        http.delete(f"/ds/made-bucket/{name}")
    ui.press("bucket-delete")
    ui.submit()
    expect(ui.page.locator("#buckets")).to_be_visible()
    expect(ui.page.locator("#buckets")).not_to_contain_text("made-bucket")


def run(command: str) -> str:
    """Run a copied command in a shell; return its output."""
    assert command.partition("curl ")[1], command
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return done.stdout


def test_actions_are_copied_as_curl_that_works(ui: Pages, http: httpx.Client) -> None:
    ui.page.keyboard.press("n")
    ui.page.locator("#create-name").fill("curl/it's")
    ui.page.locator("#create-body").fill("""["it's $HOME"]""")
    assert "201 Created" in run(ui.copied(ui.page.locator("dialog").get_by_title("Copy as curl")))
    assert http.get("/v1/stream/curl/it's?offset=-1").json() == ["it's $HOME"]
    ui.page.keyboard.press("Escape")

    ui.open_stream("curl/it's")
    ui.page.keyboard.press("a")
    ui.page.locator("#append-body").fill('{"text":"a\\n\'b\'"}')
    ui.page.locator("#producer-id").fill("shell")
    append = ui.copied(ui.page.locator("#append-box").get_by_title("Copy this append as curl"))
    assert "200 OK" in run(append)
    assert "204 No Content" in run(append), "the same append again is a duplicate"
    ui.loaded(2)
    ui.messages.nth(1).click()
    read = ui.copied(ui.page.locator("#detail").get_by_title("Copy a read of this message as curl"))
    assert run(read).endswith('[{"text":"a\\n\'b\'"}]')
    ui.press("action-close")
    close = ui.copied(ui.page.locator("dialog").get_by_title("Copy as curl"))
    assert "stream-closed: true" in run(close).lower()


def test_bytes_are_copied_as_curl_that_works(ui: Pages, http: httpx.Client) -> None:
    put(http, "curl/bytes", BYTES)
    ui.open_stream("curl/bytes")
    ui.page.keyboard.press("a")
    ui.page.locator("#append-body").fill("00 ff 0a 27")
    run(ui.copied(ui.page.locator("#append-box").get_by_title("Copy this append as curl")))
    assert http.get("/v1/stream/curl/bytes?offset=-1").content == b"\x00\xff\x0a'"


def test_requests_are_kept_with_their_responses(ui: Pages, http: httpx.Client) -> None:
    put(http, "do/requests")
    ui.open_stream("do/requests")
    ui.page.keyboard.press("a")
    ui.append("[1]")
    ui.page.locator("#append-body").blur()
    ui.page.keyboard.press("r")
    first = ui.page.locator("dialog details").first
    expect(first).to_contain_text("POST")
    first.locator("summary").first.click()
    expect(first).to_contain_text("stream-next-offset")
    assert "204 No Content" in run(ui.copied(first.get_by_title("Copy as curl")))
    assert http.get("/v1/stream/do/requests?offset=-1").json() == [1, 1]


def test_stream_with_any_name_can_be_created_and_opened(ui: Pages, http: httpx.Client) -> None:
    for name in ("a b", "ünï/☃", "per%cent", "q?x=1#y", "plus+plus", "semi;colon"):
        created = f"names/{name}" if "?" not in name else "names/q-x"
        ui.page.keyboard.press("n")
        ui.page.locator("#create-name").fill(created)
        ui.submit()
        expect(ui.page.locator("#stream-title")).to_have_text(created)
        ui.reader("live")
        listed = json.dumps(http.get("/v1/stream/__registry__?offset=-1").json(), ensure_ascii=False)
        assert created in listed
