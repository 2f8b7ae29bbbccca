"""Markdown: tables, sections with a table, and the part of a page between two markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

END = "<!-- end of generated part -->"


def table(heading: str, rows: Iterable[Sequence[str]]) -> str:
    """A table. The heading is a line of Markdown; the cells of the rows are escaped."""
    line = "|" + "---|" * (heading.count("|") - 1)
    return "\n".join([heading, line, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def section(title: str, text: str, heading: str, rows: Iterable[Sequence[str]]) -> str:
    """A section with a text and a table; empty without rows."""
    listed = list(rows)
    return f"## {title}\n\n{text}\n\n{table(heading, listed)}" if listed else ""


def replace_part(page: str, begin: str, part: str, name: str) -> str:
    """The page with this part between the marker `begin` and the next `END`."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(END)
    if not found_begin or not found_end:
        raise SystemExit(f"{name} has lost its markers: {begin} … {END}")
    return f"{before}{begin}\n\n{part}\n\n{END}{after}"
