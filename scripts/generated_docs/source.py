"""The modules of the package, as the generated parts read them."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src" / "headwater"


def modules() -> list[Path]:
    """The modules that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--", "src/headwater/*.py"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    found = (REPOSITORY / name for name in listed.stdout.decode().split("\0") if name)
    return sorted(path for path in found if path.name != "__main__.py" and path.is_file())


def parsed(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"))


def top_package(module: Path) -> str:
    """The package directly below `headwater` that has the module, or the module itself if it is there."""
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")
