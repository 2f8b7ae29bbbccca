"""The images of the pages exist, are small, and can be taken again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.docs import pictures
from tests.docs.markdown import REPOSITORY, page_id, pages
from tests.docs.pictures import BYTES_MAX, MOVING_BYTES_MAX, PHONE, SCHEMES, VIEWPORT, size_of
from tests.serving import server_environment

IMAGES = REPOSITORY / "docs" / "images"
_SHOWN = re.compile(r"!\[[^\]]*\]\((?:docs/)?images/([\w.-]+\.png)(#only-(light|dark))?\)")


def test_every_image_exists_and_is_small() -> None:
    assert {path.name for path in IMAGES.glob("*.png")} == set(pictures.names())
    for path in IMAGES.glob("*.png"):
        content = path.read_bytes()
        most = MOVING_BYTES_MAX if path.name.startswith("moving-") else BYTES_MAX
        assert len(content) < most, f"{path.name} has {len(content)} bytes"
        width, height = size_of(content)
        assert PHONE[0] <= width <= VIEWPORT[0]
        assert 400 <= height <= PHONE[1]


def test_every_image_is_shown_in_light_and_dark() -> None:
    shown = {}
    for page in pages():
        for name, _, scheme in _SHOWN.findall(page.read_text(encoding="utf-8")):
            shown[name] = scheme
            assert (IMAGES / name).is_file(), f"{page_id(page)} shows {name}, which `make screenshots` does not take"
            assert not scheme or name.endswith(f"-{scheme}.png"), f"{page_id(page)}: {name}"
    assert set(shown) == set(pictures.names())


def test_images_can_be_taken_again(tmp_path: Path, long: bool) -> None:
    # In a separate process: Playwright allows one instance per process, and other tests may use it.
    only = list(pictures.PICTURES) if long else ["state"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.pictures", str(tmp_path), *only],
        cwd=REPOSITORY,
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=1500 if long else 280,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}-{scheme}.png" for name in only for scheme in SCHEMES}
    for path in tmp_path.iterdir():
        assert size_of(path.read_bytes()) == size_of((IMAGES / path.name).read_bytes())
    for name in only:
        light, dark = ((tmp_path / f"{name}-{scheme}.png").read_bytes() for scheme in SCHEMES)
        assert light != dark
