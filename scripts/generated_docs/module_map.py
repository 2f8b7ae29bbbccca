"""The table of modules in docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

from scripts.generated_docs.markdown import table
from scripts.generated_docs.source import PACKAGE, modules, parsed


def module_map() -> str:
    """Every module with the first sentence of its docstring."""
    jobs = ((module.relative_to(PACKAGE).as_posix(), _first_sentence(module)) for module in modules())
    return table("| module | job |", ((f"`{name}`", job) for name, job in jobs if job))


def _first_sentence(module: Path) -> str:
    docstring = ast.get_docstring(parsed(module)) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".").replace("``", "`")
