"""The table of packages in docs/architecture.md lists what each package imports."""

from __future__ import annotations

import re

import grimp

from tests.docs.markdown import REPOSITORY

EVERYWHERE = {"operating_system", "printable"}
_ROW = re.compile(r"^\| ((?:`[a-z_]+/?`(?:, )?)+) \| .+ \| (.+) \|$", re.MULTILINE)
_WORD = re.compile(r"`([a-z_]+)/?`")


def allowed() -> dict[str, set[str] | None]:
    """What each package may import of ours; None means anything."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Packages")[2].partition("\n## ")[0]
    found: dict[str, set[str] | None] = {}
    for names, imports in _ROW.findall(table):
        for name in _WORD.findall(names):
            found[name] = None if imports == "anything" else set(_WORD.findall(imports))
    return found


def test_table_of_packages_lists_their_imports() -> None:
    graph = grimp.build_graph("headwater")
    table = allowed()
    actual: dict[str, set[str]] = {}
    for module in graph.modules:
        package = ".".join(module.split(".")[1:2]) or "headwater"
        for other in graph.find_modules_directly_imported_by(module):
            actual.setdefault(package, set()).update(other.split(".")[1:2])
    actual.pop("__main__")
    assert actual.keys() - {"headwater"} <= table.keys()
    assert len(actual) > 10
    for name, imports in actual.items():
        may = table.get(name)
        if may is not None:
            assert imports - {name} <= may | EVERYWHERE, name
