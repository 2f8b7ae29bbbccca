"""A real browser for tests of pages: Debian's Chromium without a window, driven by Playwright.

Invariant: one for the whole run, because Playwright allows one instance in a process. Between its calls its event loop
counts as running in this thread, so it is hidden from the tests that do not use it: they may call `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Generator, Iterator

import pytest
from playwright.sync_api import Browser, Playwright, sync_playwright

WAIT_MS = 60_000
"""A limit for a busy machine: a page alone takes seconds of CPU time."""

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first one that is installed is used. The one without a window uses a third of the CPU time for a page."""
MISSING = "Chromium is missing; on Debian: apt-get install chromium-headless-shell"


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def chromium() -> str:
    found = find_chromium()
    if found is None:
        pytest.fail(MISSING)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if "playwright" in getattr(item, "fixturenames", ()):
        return (yield)
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return (yield)
    finally:
        asyncio._set_running_loop(loop)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as running:
        loop = asyncio._get_running_loop()
        yield running
        asyncio._set_running_loop(loop)


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    launched = playwright.chromium.launch(executable_path=chromium(), headless=True, args=list(FLAGS))
    loop = asyncio._get_running_loop()
    yield launched
    asyncio._set_running_loop(loop)
    launched.close()
