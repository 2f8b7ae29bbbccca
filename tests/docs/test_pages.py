"""Checks of the documentation: generated tables, links, named tests, foreign hosts."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench import directions_page

from tests.docs.markdown import REPOSITORY, links, page_id, pages
from tests.serving import server_environment

_NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
        timeout=60,
    )
    found = [REPOSITORY / name.decode() for name in listed.stdout.split(b"\0") if name]
    assert len(found) > 20, "the repository's files could not be listed"
    return [path for path in found if path.is_file()]


def test_the_generated_parts_match_the_code() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"],
        cwd=REPOSITORY,
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr


def test_table_of_the_pipelines_directions_is_that_of_the_saved_run() -> None:
    page = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert directions_page.table(json.loads((REPOSITORY / "bench" / "directions.json").read_text())) in page


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_targets_of_links_exist(page: Path) -> None:
    for link in links(page):
        if not link.startswith(("http:", "https:", "#")):
            assert (page.parent / link.partition("#")[0]).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize(
    "page", [page for page in pages() if page_id(page).startswith(("docs/", "bench/", "examples/"))], ids=page_id
)
def test_page_begins_with_what_the_reader_can_do_after_it(page: Path) -> None:
    text = re.sub(r"<!--.*?-->|\A---\n.*?\n---\n", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    title, _, rest = text.strip().partition("\n")
    assert title.startswith("# ")
    begins = ("After this page", "In five minutes you", "In fifteen minutes you", "**Headwater is a server")
    assert rest.strip().startswith(begins), rest.strip()[:80]


def test_every_module_that_the_architecture_names_exists() -> None:
    page = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    package = REPOSITORY / "src/headwater"
    packages = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    any_package = "|".join(sorted(packages))
    named = set(re.findall(rf"(?<![\w/.])((?:{any_package})/[\w/]*(?:\.py)?)", page))
    assert len(named) > 100
    for name in sorted(named):
        path = package / name
        files = (path, path.with_suffix(".py"), path.with_suffix(".pyx"))
        assert path.is_dir() or any(file.is_file() for file in files), f"there is no {name}"
    table = page.partition("| package | responsibility | may import |")[2].partition("\n\n")[0]
    described = re.findall(r"`(\w+)/?`", " ".join(re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)))
    assert set(described) >= packages, "every package is described"


def test_the_picture_of_the_packages_keeps_to_the_contracts() -> None:
    """The picture is drawn from the imports, so a forbidden arrow would be a forbidden import."""
    picture = (REPOSITORY / "docs/images/packages.svg").read_text(encoding="utf-8")
    arrows = set(re.findall(r'data-from="(\w+)" data-to="(\w+)"', picture))
    assert {("http", "engine"), ("engine", "storage"), ("storage", "core"), ("engine", "core")} <= arrows
    assert not [target for source, target in arrows if source == "core"]
    allowed = {"core", "operating_system"}
    assert not [target for source, target in arrows if source == "storage" and target not in allowed]
    assert ("http", "storage") not in arrows
    server = {"core", "storage", "engine", "http"}
    assert not {(a, b) for a, b in arrows if a in {"client", "spark", "pipeline", "postgres"} and b in server}


@pytest.mark.parametrize("page", ["docs/traceability.md", "docs/gaps.md", "docs/compatibility.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = set(_NAMED_TEST.findall((REPOSITORY / page).read_text(encoding="utf-8")))
    assert len(named) >= 10
    for file, name in sorted(named):
        path = REPOSITORY / file
        assert path.exists(), f"{page} names {file}"
        functions = {
            node.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in functions, f"{page} names {file}::{name}"


def test_every_row_of_the_traceability_table_has_a_rule_and_a_test() -> None:
    rows = [
        line
        for line in (REPOSITORY / "docs/traceability.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| behaviour")
    ]
    assert len(rows) > 30
    for row in rows:
        behaviour, rule, proof = (cell.strip() for cell in row.strip("|").split("|"))
        assert behaviour
        assert rule, row
        assert _NAMED_TEST.search(proof) or "conformance: " in proof or "gaps.md" in proof, row


def test_the_pinned_suite_is_the_one_that_is_installed() -> None:
    pins = json.loads((REPOSITORY / "tests/npm/package.json").read_text())["dependencies"]
    page = (REPOSITORY / "docs/SPEC_VERSION.md").read_text(encoding="utf-8")
    for package in ("server-conformance-tests", "client"):
        assert f"`@durable-streams/{package}@{pins[f'@durable-streams/{package}']}`" in page


def test_no_package_registry_is_named() -> None:
    # Split, so that this file does not name them either.
    hosts = [
        "pypi" + ".org",
        "pythonhosted" + ".org",
        "npmjs" + ".org",
        "npmjs" + ".com",
        "deb.debian" + ".org",
    ]
    for path in tracked_files():
        content = path.read_bytes()
        for host in hosts:
            assert host.encode() not in content, f"{path.relative_to(REPOSITORY)} names {host}"


def test_lock_files_hold_hashes_and_no_addresses() -> None:
    locks = sorted((REPOSITORY / "requirements").glob("*.txt"))
    assert {lock.stem for lock in locks} >= {"build", "dev", "docs", "node", "runtime", "stack"}
    for lock in locks:
        text = lock.read_text(encoding="utf-8")
        assert "://" not in text
        for entry in re.split(r"\n(?=\S)", text.strip()):
            assert re.match(r"[\w.\[\]-]+==\S+", entry), entry
            assert "--hash=sha256:" in entry, entry


def test_no_file_names_a_path_of_one_machine() -> None:
    places = ["/" + "root/", "/" + "work/main", "/" + "home/"]
    for path in tracked_files():
        content = path.read_bytes()
        for place in places:
            assert place.encode() not in content, f"{path.relative_to(REPOSITORY)} names {place}"


@pytest.mark.parametrize("page", ["docs/decisions.md", "docs/gaps.md"])
def test_every_entry_has_its_own_id(page: str) -> None:
    ids = re.findall(r"^\| ([PAOG]-\d+) \|", (REPOSITORY / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(ids) > 5
    assert sorted(ids) == sorted(set(ids))
