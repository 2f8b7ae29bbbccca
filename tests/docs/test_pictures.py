"""The images of the pages exist, are small, and can be taken again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.docs import pictures
from tests.docs.markdown import REPOSITORY, page_id, pages
from tests.docs.pictures import BYTES_MAX, PHONE, VIEWPORT, size_of
from tests.ui.conftest import chromium

IMAGES = REPOSITORY / "docs" / "images"
_SHOWN = re.compile(r"!\[[^\]]*\]\((?:docs/)?images/([\w.-]+\.png)(#only-(light|dark))?\)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), headless=True, args=list(pictures.FLAGS))
        yield launched
        launched.close()


def test_every_picture_is_there_and_small() -> None:
    assert {path.name for path in IMAGES.glob("*.png")} == set(pictures.names())
    for path in IMAGES.glob("*.png"):
        content = path.read_bytes()
        assert len(content) < BYTES_MAX, f"{path.name} has {len(content)} bytes"
        width, height = size_of(content)
        assert PHONE[0] <= width <= VIEWPORT[0]
        assert 400 <= height <= PHONE[1]


def test_every_picture_is_shown_light_and_dark() -> None:
    shown = {}
    for page in pages():
        for name, _, scheme in _SHOWN.findall(page.read_text(encoding="utf-8")):
            shown[name] = scheme
            assert (IMAGES / name).is_file(), f"{page_id(page)} shows {name}, which `make screenshots` does not take"
            assert not scheme or name.endswith(f"-{scheme}.png"), f"{page_id(page)}: {name}"
    assert set(shown) == set(pictures.names())


def test_they_can_be_taken_again(browser: Browser, tmp_path: Path, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not long:
        chosen = {name: prepare for name, prepare in pictures.PICTURES.items() if name in {"state", "subscription"}}
        monkeypatch.setattr(pictures, "PICTURES", chosen)
    pictures.take_all(browser, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(pictures.names())
    for path in tmp_path.iterdir():
        assert size_of(path.read_bytes()) == size_of((IMAGES / path.name).read_bytes())
    for name in pictures.PICTURES:
        light, dark = ((tmp_path / f"{name}-{scheme}.png").read_bytes() for scheme in pictures.SCHEMES)
        assert light != dark
