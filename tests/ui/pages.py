"""Page object of the stream browser: what a user can click, type and read."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from urllib.parse import quote

import httpx
from playwright.sync_api import Locator, Page, expect

from tests.browser import WAIT_MS

JSON = {"Content-Type": "application/json"}
TEXT = {"Content-Type": "text/plain"}
BYTES = {"Content-Type": "application/octet-stream"}

COPY_TIMEOUT_S = 60.0

expect.set_options(timeout=WAIT_MS)


class Pages:
    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url

    def open(self, place: str = "") -> None:
        self.page.goto(f"{self.url}/ui/{place}")

    def open_stream(self, name: str, query: str = "") -> None:
        self.open(f"#/stream/{quote(name)}{query}")
        expect(self.page.locator("#stream-title")).to_have_text(name)

    def reader(self, state: str) -> None:
        """Wait until the messages are in a state."""
        expect(self.page.locator("#reader-status")).to_have_attribute("data-state", state)

    def loaded(self, count: int) -> None:
        expect(self.page.locator("#reader-status")).to_have_attribute("data-loaded", str(count))

    def loaded_more_than(self, count: int) -> None:
        self.page.wait_for_function(
            "count => Number(document.querySelector('#reader-status').dataset.loaded) > count", arg=count
        )

    @property
    def messages(self) -> Locator:
        return self.page.locator("#messages [data-index]")

    @property
    def streams(self) -> Locator:
        return self.page.locator("#streams [data-index]")

    def stream(self, name: str) -> Locator:
        return self.page.locator(f"#streams [data-index][title='{name}']")

    def shows(self, *previews: str) -> None:
        """Wait until the list shows exactly these messages."""
        expect(self.page.locator("#messages .preview")).to_have_text(previews)

    def press(self, id_: str) -> None:
        self.page.locator(f"#{id_}").click()

    def submit(self) -> None:
        self.press("dialog-submit")

    def append(self, body: str, producer: Sequence[str] = ()) -> Locator:
        """Append with the append box, which must be open; return the panel with the response."""
        self.page.locator("#append-body").fill(body)
        for name, value in zip(("id", "epoch", "seq"), producer, strict=False):
            self.page.locator(f"#producer-{name}").fill(value)
        before = self.page.locator("#append-answer .answer")
        marked = before.count() > 0
        if marked:
            before.evaluate("element => element.classList.add('stale')")
        self.press("append-send")
        answer = self.page.locator("#append-answer .answer:not(.stale)")
        expect(answer).to_be_visible()
        return answer

    def copied(self, button: Locator) -> str:
        """The text that a click on this button copies; the browser fills the clipboard asynchronously."""
        self.page.evaluate("navigator.clipboard.writeText('')")
        button.click()
        deadline = time.monotonic() + COPY_TIMEOUT_S
        while not (text := str(self.page.evaluate("navigator.clipboard.readText()"))):
            assert time.monotonic() < deadline, "nothing was copied"
            self.page.wait_for_timeout(20)
        return text


def put(http: httpx.Client, name: str, headers: dict[str, str] = JSON, body: bytes | str = b"") -> None:
    answer = http.put(f"/v1/stream/{quote(name)}", headers=headers, content=body)
    assert answer.status_code == 201, answer.text


def post(http: httpx.Client, name: str, body: object, headers: dict[str, str] = JSON) -> str:
    """Append a message; return the offset after it."""
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    answer = http.post(f"/v1/stream/{quote(name)}", headers=headers, content=content)
    assert answer.status_code in {200, 204}, answer.text
    return str(answer.headers["stream-next-offset"])
