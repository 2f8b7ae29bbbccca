"""The files of the stream browser: how they are packaged and served, and what they must not contain."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = REPOSITORY / "src" / "headwater" / "ui"
ALL = sorted(path for path in FILES.rglob("*") if path.is_file())
SCRIPTS = [path for path in ALL if path.suffix == ".js"]


def served(path: Path) -> str:
    return f"/ui/{path.relative_to(FILES).as_posix()}"


def test_address_without_a_slash_redirects_to_the_page(http: httpx.Client) -> None:
    answer = http.get("/ui")
    assert answer.status_code == 307
    assert answer.headers["location"] == "ui/"
    assert http.get("/ui", follow_redirects=True).headers["content-type"].startswith("text/html")


def test_root_redirects_to_the_page(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.status_code == 307
    assert http.get("/", follow_redirects=True).headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("path", ALL, ids=served)
def test_every_file_is_served_with_the_policy(http: httpx.Client, path: Path) -> None:
    answer = http.get(served(path))
    assert answer.status_code == 200
    assert answer.content == path.read_bytes()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"


def test_cached_file_is_not_sent_again(http: httpx.Client) -> None:
    first = http.get("/ui/js/main.js")
    again = http.get("/ui/js/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


@pytest.mark.parametrize("name", ["nothing.js", "../http/ui.py", "js", "js/", "%2e%2e/config/layers.py"])
def test_other_files_are_not_served(http: httpx.Client, name: str) -> None:
    assert http.get(f"/ui/{name}").status_code in {404, 400}


def test_other_methods_are_405_for_ui_files(http: httpx.Client) -> None:
    assert http.post("/ui/").status_code == 405


def test_files_do_not_refer_to_other_hosts() -> None:
    for path in ALL:
        text = path.read_text(encoding="utf-8")
        # Namespaces and placeholders in input fields are not fetched.
        addresses = set(re.findall(r"https?://\w[\w.]+", text)) - {"http://www.w3.org", "https://example.com"}
        assert addresses == set(), path


@pytest.mark.parametrize("path", SCRIPTS, ids=served)
def test_no_script_parses_a_string_as_markup(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    sinks = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|createContextualFragment"
    )
    assert re.findall(sinks, text) == []


def test_the_page_has_no_inline_script_or_style() -> None:
    page = (FILES / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", page) == []


def test_package_contains_the_files(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "HEADWATER_BUILD": "pure"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in ALL:
        assert f"headwater/ui/{path.relative_to(FILES).as_posix()}" in names
    assert {"headwater/config/profiles/dev.toml", "headwater/config/profiles/prod.toml"} <= names
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata
