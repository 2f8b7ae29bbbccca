"""Rules of the source tree that no single module can check: no import cycles, and one meaning for each class name."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

SOURCE = Path(__file__).resolve().parents[1] / "src" / "headwater"


def cycle_in(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle, or none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_through_others() -> None:
    """Also for imports that only type checkers see: two modules that need each other are one module."""
    graph = grimp.build_graph("headwater", exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    assert cycle_in({module: found & imports.keys() for module, found in imports.items()}) == []


def test_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def class_names() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(SOURCE)))
    return found


def test_class_name_is_used_once() -> None:
    names = class_names()
    assert len(names) > 100
    assert {name: paths for name, paths in names.items() if len(paths) > 1} == {}
