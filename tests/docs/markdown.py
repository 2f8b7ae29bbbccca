"""What the tests need of a Markdown page: its command blocks with the output they promise, and its links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    REPOSITORY / "bench/README.md",
)

_FENCE = re.compile(r"^```(\w*)$")
_NOT_RUN = re.compile(r"<!-- not run: .+ -->")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Example:
    """A `bash` block, and the lines of the `text` block right after it (none, if there is none)."""

    line: int
    commands: tuple[str, ...]
    output: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    line: int
    language: str
    content: tuple[str, ...]
    run: bool


def examples(page: Path) -> list[Example]:
    """The blocks to run, in order. One that cannot be run says so in a comment line just above it."""
    blocks = list(_blocks(page))
    found = []
    for block, after in zip(blocks, [*blocks, None][1:], strict=True):
        if block.language != "bash" or not block.run:
            continue
        # The promised output begins on the line below the closing fence.
        end = block.line + len(block.content) + 2
        promises = after is not None and after.language == "text" and after.line == end
        output = after.content if after is not None and promises else ()
        commands = tuple(line for line in block.content if line.strip() and not line.startswith("#"))
        found.append(Example(block.line, commands, tuple(line for line in output if line.strip())))
    return found


def links(page: Path) -> list[str]:
    return _LINK.findall(page.read_text(encoding="utf-8"))


def _blocks(page: Path) -> Iterator[_Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        number += 1
        if opened is None:
            continue
        start = number
        while lines[number] != "```":
            number += 1
        run = start < 2 or not _NOT_RUN.fullmatch(lines[start - 2])
        yield _Block(start, opened[1], tuple(lines[start:number]), run)
        number += 1
