"""Chromium for the pages of the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser import WAIT_MS
from tests.examples.network import Network

CUT = ("network error", "TypeError: network error", "Failed to fetch", "TypeError: Failed to fetch")
expect.set_options(timeout=WAIT_MS)
Tab = Callable[[str], Page]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """What the browser reaches everything by."""
    with Network().running() as network:
        yield network


@pytest.fixture
def context(browser: Browser, network: Network) -> Iterator[BrowserContext]:
    """A browser profile whose tabs must not throw."""
    network.restore()
    opened = browser.new_context(proxy={"server": network.url, "bypass": "<-loopback>"})
    errors: list[str] = []
    opened.on("weberror", lambda error: errors.append(str(error.error)))
    yield opened
    opened.close()
    # The official client leaves a promise unhandled when a live connection is cut; the page has seen the error.
    assert [error for error in errors if error not in CUT] == []


@pytest.fixture
def tab(context: BrowserContext) -> Tab:
    def open_tab(url: str) -> Page:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(url)
        return page

    return open_tab
