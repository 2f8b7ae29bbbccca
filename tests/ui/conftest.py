"""The stream browser in a real browser.

Invariant: a test fails if the page raises an error, violates its policy, or sends a request to an unexpected host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tests.browser import WAIT_MS
from tests.serving import Server, serve
from tests.shared_servers import shared_server
from tests.ui.pages import Pages

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "ui"


@pytest.fixture(scope="session")
def ui_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with a registry, shared by the tests that do not stop it."""
    with shared_server(
        request.config,
        DS_REGISTRY__ENABLED="true",
        DS_LIMITS__MAX_STREAM_BYTES="0",
        DS_LIMITS__MAX_MEMORY_BYTES=str(2**30),
        DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS="true",
    ) as running:
        yield running


@pytest.fixture
def http(ui_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=ui_server.url, timeout=60) as client:
        yield client


class Starter(Protocol):
    def __call__(self, **settings: str) -> Server: ...


@pytest.fixture
def own_server() -> Iterator[Starter]:
    """Starts servers for one test. Request it before `watched`, so that the page is closed before its server stops."""
    with ExitStack() as running:
        yield lambda **settings: running.enter_context(serve(**settings))


class Watched:
    """A browser context whose pages must not raise errors."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.allowed: list[re.Pattern[str]] = []

    def page(self) -> Page:
        page = self.context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.errors.append(f"thrown: {error}"))
        page.on("console", lambda message: self._said(message.type, message.text))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname or ""))
        return page

    def allow(self, pattern: str) -> None:
        """Allow this console message: the browser logs errors that the test provokes."""
        self.allowed.append(re.compile(pattern))

    def _said(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"} and not any(pattern.search(text) for pattern in self.allowed):
            self.errors.append(f"{kind}: {text}")


@contextmanager
def watching(browser: Browser) -> Iterator[Watched]:
    context = browser.new_context(
        viewport={"width": 1280, "height": 800}, permissions=["clipboard-read", "clipboard-write"]
    )
    watched = Watched(context)
    # The browser logs rejected requests to the console. The page shows them, so they are not errors of the page.
    watched.allow(r"Failed to load resource: the server responded with a status of 4")
    yield watched
    context.close()
    assert watched.hosts <= {"127.0.0.1", "localhost"}, f"the page sent requests to {watched.hosts}"
    assert watched.errors == []


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    with watching(browser) as context:
        yield context


@pytest.fixture
def ui(watched: Watched, ui_server: Server) -> Pages:
    """The stream browser, open at its first page."""
    pages = Pages(watched.page(), ui_server.url)
    pages.open()
    return pages


@pytest.fixture
def screenshot(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """Save a screenshot under build/ui/, for review and for the docs."""

    def keep(page: Page, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")

    return keep
