"""Pages about the code name modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import REPOSITORY

SOURCE = REPOSITORY / "src" / "headwater"
PACKAGES = {path.name for path in SOURCE.iterdir() if path.is_dir()}
_MODULE = re.compile(r"`((?:[a-z_]+/)+[a-z_]*)(?:\.py)?`")
_ENTRY = re.compile(r"^\| ([PAO])-([0-9]+) \|", re.MULTILINE)
SECTIONS = {"P": "Protocol", "A": "Architecture", "O": "Operational"}


def is_there(name: str) -> bool:
    place = SOURCE / name.rstrip("/")
    return place.exists() or any(place.with_suffix(suffix).exists() for suffix in (".py", ".pyi"))


@pytest.mark.parametrize("page", ["architecture.md", "decisions.md"])
def test_modules_that_a_page_names_exist(page: str) -> None:
    text = Path(REPOSITORY, "docs", page).read_text(encoding="utf-8")
    named = {name for name in _MODULE.findall(text) if name.partition("/")[0] in PACKAGES}
    assert named
    assert [name for name in sorted(named) if not is_there(name)] == []


def test_each_decision_is_in_the_table_of_its_category() -> None:
    text = Path(REPOSITORY, "docs", "decisions.md").read_text(encoding="utf-8")
    entries = _ENTRY.findall(text)
    assert len(entries) > 200
    assert len(set(entries)) == len(entries), "each id is used once"
    for section in text.split("\n## ")[1:]:
        assert {SECTIONS[category] for category, _ in _ENTRY.findall(section)} == {section.partition("\n")[0]}
