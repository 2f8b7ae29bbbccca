"""The picture of the packages and their imports in docs/architecture.md."""

from __future__ import annotations

import ast
import math

from scripts.generated_docs.source import modules, parsed, top_package
from scripts.generated_docs.svg import picture

PACKAGES = {
    "cli": (0, 1, "the command"),
    "printable": (0, 0, "text for terminals"),
    "telemetry": (0, 2, "logs"),
    "config": (0, 3, "settings"),
    "cluster": (0, 4, "workers, relaying"),
    "http": (1, 0, "requests, live reads"),
    "engine": (1, 1, "commits and publishes"),
    "storage": (1, 2, "journal and cold store"),
    "core": (1, 3, "rules, without I/O"),
    "operating_system": (1, 4, "Linux and macOS"),
    "client": (2, 0, "the protocol client"),
    "stack": (3, 1, "Envoy and Postgres"),
    "pipeline": (2, 2, "jobs"),
    "spark": (2, 1, "source and sink"),
    "postgres": (3, 2, "Postgres itself"),
    "shapes": (3, 0, "Electric's Shape API"),
    "server": (2, 3, "a server to embed"),
    "testing": (3, 3, "fixtures for tests"),
    "ai": (2, 4, "durable model output"),
    "otel": (3, 4, "OpenTelemetry"),
}
"""The position of a package in the picture (column, row), and its job in a few words. Arrows are from the code."""

_COLUMN, _ROW_HEIGHT, _WIDTH, _HEIGHT = 220, 110, 170, 56
_STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1c2430}.job{font-size:11px;fill:#5b6678}"
    "rect{fill:#e6f4f1;stroke:#0f766e}"
    "path{fill:none;stroke:#64748b;stroke-width:1.2}marker path{fill:#64748b;stroke:none}"
    "@media(prefers-color-scheme:dark){text{fill:#e5e9f0}.job{fill:#a3adbd}rect{fill:#12312e;stroke:#2cb5a5}"
    "path{stroke:#8b97a9}marker path{fill:#8b97a9}}"
)


def packages_picture() -> str:
    """The packages and their imports, as a picture."""
    packages = {top_package(module) for module in modules()} - {"__init__"}
    if unknown := packages - set(PACKAGES):
        raise SystemExit(f"give {', '.join(sorted(unknown))} a place in PACKAGES of {__file__}")
    arrows = "".join(_arrow(source, target) for source, target in sorted(_imports()) if target in packages)
    boxes = "".join(_box(package) for package in PACKAGES if package in packages)
    size = f'viewBox="0 0 {4 * _COLUMN} {5 * _ROW_HEIGHT}"'
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
        ' orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    return picture(size, "The packages and their imports", _STYLE, f"{tip}{arrows}{boxes}")


def _imports() -> set[tuple[str, str]]:
    """Pairs of packages where the first imports the second."""
    found = set()
    for module in modules():
        package = top_package(module)
        for node in ast.walk(parsed(module)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            targets = [name.split(".")[1] for name in names if name.startswith("headwater.")]
            found |= {(package, target) for target in targets if package not in {target, "__init__"}}
    return found


def _centre(package: str) -> tuple[float, float]:
    column, row, _ = PACKAGES[package]
    return column * _COLUMN + _COLUMN / 2, row * _ROW_HEIGHT + _ROW_HEIGHT / 2


def _box(package: str) -> str:
    x, y = _centre(package)
    corner = f'x="{x - _WIDTH / 2:g}" y="{y - _HEIGHT / 2:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="8"'
    words = f'<text x="{x:g}" y="{y - 3:g}" text-anchor="middle">{package}</text>'
    job = f'<text class="job" x="{x:g}" y="{y + 15:g}" text-anchor="middle">{PACKAGES[package][2]}</text>'
    return f'<g id="{package}"><rect {corner}/>{words}{job}</g>'


def _arrow(source: str, target: str) -> str:
    """An arc between two packages, which avoids those in between."""
    (ax, ay), (bx, by) = _centre(source), _centre(target)
    far = math.hypot(bx - ax, by - ay)
    bow = 0.0 if far < 1.6 * _ROW_HEIGHT else 0.38
    cx, cy = (ax + bx) / 2 - (by - ay) * bow, (ay + by) / 2 + (bx - ax) * bow * 0.4
    # It ends at the edge of the box, in the direction of the middle of the arc.
    dx, dy = cx - bx, cy - by
    reach = min(_WIDTH / 2 / abs(dx) if dx else math.inf, _HEIGHT / 2 / abs(dy) if dy else math.inf)
    ex, ey = bx + dx * reach, by + dy * reach
    way = f"M{ax:.0f} {ay:.0f}Q{cx:.0f} {cy:.0f} {ex:.0f} {ey:.0f}"
    return f'<path data-from="{source}" data-to="{target}" d="{way}" marker-end="url(#tip)"/>'
