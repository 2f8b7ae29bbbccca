"""The documentation site builds without warnings, loads nothing from other hosts, and its tables are correct."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser

from tests.docs.markdown import REPOSITORY, pages
from tests.serving import Server, server_environment

_METRIC_ROW = re.compile(r"^\| `((?:headwater|process)_\w+)` \| (\w+) \| (.+?) \|$", re.MULTILINE)
_BENCH = re.compile(r"python -m (bench\.\w+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return built


class Loaded(HTMLParser):
    """The resources that a page loads: scripts, styles, images, frames."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in {"script", "img", "iframe", "source", "video"} and given.get("src"):
            self.addresses.append(given["src"] or "")
        elif tag == "link" and given.get("rel") in {"stylesheet", "icon", "preload", "preconnect"}:
            self.addresses.append(given.get("href") or "")


def test_site_builds_without_warnings_and_has_every_page_of_the_navigation(site: Path) -> None:
    for page in ("index.html", "quickstart/index.html", "protocol/index.html", "clients/index.html"):
        assert (site / page).is_file()
    assert (site / "search" / "search_index.json").is_file()


def test_no_page_loads_from_another_host(site: Path) -> None:
    found = sorted(site.rglob("*.html"))
    assert len(found) > 20
    for page in found:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.addresses
        for address in loaded.addresses:
            assert not urlsplit(address).netloc, f"{page.relative_to(site)} loads {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_no_page_makes_the_theme_load_external_resources(site: Path) -> None:
    """The theme would load a script for diagrams from another host, and query a code host about the repository."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'class="mermaid"' not in text, page.name
        assert 'data-md-component="source"' not in text, page.name


OUTSIDE = """() => {
    const width = document.documentElement.clientWidth;
    const outside = (node) => node.getBoundingClientRect().right > width + 1;
    const cells = [...document.querySelectorAll("article table[data-stacked] td, article pre > code, article img")];
    return {
        page: document.documentElement.scrollWidth - width,
        outside: cells.filter(outside).map((node) => node.textContent || node.src),
        stacked: document.querySelectorAll("article table[data-stacked]").length,
    };
}"""


@pytest.mark.parametrize("page", ["configuration", "why-not", "benchmarks"])
def test_a_phone_shows_every_sentence_of_a_table_and_all_code(site: Path, browser: Browser, page: str) -> None:
    """Sentences are stacked; numbers, which are compared by column, may scroll."""
    with browser.new_context(viewport={"width": 390, "height": 844}, is_mobile=True) as phone:
        shown = phone.new_page()
        shown.goto((site / page / "index.html").as_uri())
        found = shown.evaluate(OUTSIDE)
    assert found["page"] == 0, "the page scrolls sideways"
    assert found["outside"] == []
    assert found["stacked"] > 0


def test_a_diagram_is_not_wrapped(site: Path) -> None:
    for page in ("architecture", "ai", "deployment"):
        text = (site / page / "index.html").read_text(encoding="utf-8")
        assert text.count("<div data-diagram") == 1, page
        diagram = text.partition("<div data-diagram")[2].partition("</div>")[0]
        assert "─" in diagram, page
        assert "<wbr>" not in diagram, page


def test_table_of_metrics_matches_the_server(client: httpx.Client) -> None:
    text = client.get("/metrics").text
    helps = dict(re.findall(r"^# HELP (\w+) (.+)$", text, re.MULTILINE))
    served = {(name, kind, helps[name]) for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)}
    page = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
    assert len(served) > 15
    assert set(_METRIC_ROW.findall(page)) == served


_HELP = """
import contextlib, io, runpy, sys
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, module
    assert "usage:" in printed.getvalue(), module
"""
"""Print the help of several programs in one process, because their imports take most of the time."""


def test_every_benchmark_is_on_the_page() -> None:
    servers = {"echo_server", "slow_disk", "sse_readers"}
    programs = {path.stem for path in (REPOSITORY / "bench").glob("*.py") if "__main__" in path.read_text()} - servers
    page = (REPOSITORY / "bench/README.md").read_text(encoding="utf-8")
    assert {name.removeprefix("bench.") for name in _BENCH.findall(page)} == programs


def test_benchmarks_named_on_a_page_exist() -> None:
    modules = set()
    for page in ("docs/benchmarks.md", "bench/README.md"):
        named = set(_BENCH.findall((REPOSITORY / page).read_text(encoding="utf-8")))
        assert len(named) >= 2, page
        modules |= named
    done = subprocess.run(
        [sys.executable, "-c", _HELP, *sorted(modules)],
        cwd=REPOSITORY,
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_the_api_page_names_every_service_address(server: Server) -> None:
    page = (REPOSITORY / "docs/api.md").read_text(encoding="utf-8")
    with httpx.Client(base_url=server.url) as http:
        for address in ("/healthz", "/readyz", "/metrics", "/ui/", "/ds", "/v1/stream/__ds/subscriptions"):
            assert f"`{address}" in page
            assert http.get(address).status_code == 200, address


def test_cli_page_lists_exactly_the_commands() -> None:
    from headwater.cli import command_line

    app = command_line()
    page = (REPOSITORY / "docs/cli.md").read_text(encoding="utf-8")
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    commands |= {group.name or "" for group in app.registered_groups}
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    assert {words.split()[0] for words in re.findall(r"`([a-z][a-z ]+)`", rows)} == commands


def test_every_page_is_in_the_navigation() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w/.-]+\.md)$", navigation, re.MULTILINE)
    kept = [page.relative_to(REPOSITORY / "docs").as_posix() for page in pages() if REPOSITORY / "docs" in page.parents]
    assert sorted(listed) == sorted(kept)
