"""Messages as files, and appending a message again."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import httpx
from playwright.sync_api import expect

from tests.ui.pages import BYTES, JSON, TEXT, Pages, post, put


def downloaded(ui: Pages, id_: str) -> tuple[str, bytes]:
    """The name and the content of the file that a button saves."""
    with ui.page.expect_download() as download:
        ui.page.locator(id_).click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def of_list(ui: Pages, format_: str) -> tuple[str, bytes]:
    ui.page.locator("#download").click()
    return downloaded(ui, f"#download-{format_}")


def test_json_messages_are_saved_as_lines_byte_for_byte(ui: Pages, http: httpx.Client) -> None:
    put(http, "save/json")
    post(http, "save/json", b'[{"id":9007199254740993,"at":1.0},{\n "text":"two\\nlines"}]', JSON)
    ui.open_stream("save/json")
    ui.loaded(2)
    name, content = of_list(ui, "lines")
    assert name == "save-json.jsonl"
    assert content == b'{"id":9007199254740993,"at":1.0}\n{  "text":"two\\nlines"}\n'


def test_table_has_the_filtered_messages_and_the_chosen_fields(ui: Pages, http: httpx.Client) -> None:
    put(http, "save/table")
    post(http, "save/table", [{"who": "Ada", "n": 1}, {"who": "Bob", "n": 2}, {"who": '=A1,"x"', "n": -3}])
    ui.open_stream("save/table")
    ui.loaded(3)
    _, content = of_list(ui, "table")
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert [row["message"] for row in rows][:2] == ['{"who": "Ada", "n": 1}', '{"who": "Bob", "n": 2}']
    assert rows[0]["offset"].startswith("0000000000000000_")
    assert rows[0]["received"].endswith("Z")
    ui.page.locator("#fields").click()
    for field in ("who", "n"):
        ui.page.locator(f"dialog input[value='{field}']").check()
    ui.page.keyboard.press("Escape")
    ui.page.locator("#search").fill("who!=Bob")
    expect(ui.page.locator("#found")).to_contain_text("2 found")
    _, content = of_list(ui, "table")
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert [(row["who"], row["n"]) for row in rows] == [("Ada", "1"), ('\'=A1,"x"', "-3")], "not a formula"


def test_text_and_bytes_are_saved_unchanged(ui: Pages, http: httpx.Client) -> None:
    put(http, "save/text", TEXT)
    post(http, "save/text", "two\nlines", TEXT)
    post(http, "save/text", "größer", TEXT)
    ui.open_stream("save/text")
    ui.loaded(2)
    assert of_list(ui, "text") == ("save-text.txt", "two\nlines\ngrößer\n".encode())
    put(http, "save/bytes", BYTES)
    post(http, "save/bytes", bytes(range(256)), BYTES)
    ui.open_stream("save/bytes")
    ui.loaded(1)
    assert of_list(ui, "bytes") == ("save-bytes.bin", bytes(range(256)))
    ui.messages.first.click()
    assert downloaded(ui, "#detail button:has-text('Save')") == ("bytes-0.bin", bytes(range(256)))


def test_message_is_appended_again(ui: Pages, http: httpx.Client) -> None:
    for name, headers, body in (
        ("again/json", JSON, b'{"id":9007199254740993}'),
        ("again/array", JSON, b"[[1,2]]"),
        ("again/bytes", BYTES, b"\x00\xff"),
    ):
        put(http, name, headers)
        post(http, name, body, headers)
        ui.open_stream(name)
        ui.loaded(1)
        ui.messages.first.click()
        ui.page.locator("#detail button:has-text('Append again')").click()
        ui.page.locator("#append-send").click()
        ui.loaded(2)
        stored = http.get(f"/v1/stream/{name}", params={"offset": "-1"}).content
        once = body[1:-1] if name == "again/array" else body
        assert stored == (once * 2 if headers is BYTES else b"[" + once + b"," + once + b"]")
