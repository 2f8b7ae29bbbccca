"""Parse a Markdown page: its code blocks with their instructions, and its links.

A block that is not run here has a comment line above it: `<!-- not run: why -->`, or `<!-- run by: tests/… -->` if
another test runs it. If another test runs all blocks of one language, the page says so once, anywhere:
`<!-- python run by: tests/… -->`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>[\w+-]*)(?P<rest>.*)$")
_MARK = re.compile(r"<!-- (?P<how>not run|run by): (?P<what>\S.*?) -->")
_PAGE_MARK = re.compile(r"^<!-- (?P<language>\w+) run by: (?P<what>\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `line` is that of its first line of content, counted from 1."""

    line: int
    language: str
    content: tuple[str, ...]
    not_run: str = ""
    """Why it is not run."""
    run_by: str = ""
    """The test that runs it."""

    @property
    def marked(self) -> bool:
        return bool(self.not_run or self.run_by)

    @property
    def text(self) -> str:
        return "\n".join(self.content) + "\n"


@dataclass(frozen=True, slots=True)
class Example:
    """A block to run, and the lines of the `text` block right after it, if there is one."""

    block: Block
    output: tuple[str, ...]

    @property
    def line(self) -> int:
        return self.block.line

    @property
    def commands(self) -> tuple[str, ...]:
        """The lines of a `bash` block without comments and empty lines."""
        return tuple(line for line in self.block.content if line.strip() and not line.startswith("#"))


@cache
def pages() -> tuple[Path, ...]:
    """Every Markdown page of the repository, in order."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--", "*.md"], cwd=REPOSITORY, capture_output=True, check=True, timeout=30
    )
    found = [REPOSITORY / name.decode() for name in listed.stdout.split(b"\0") if name]
    assert len(found) > 10, "the pages could not be listed"
    return tuple(sorted(path for path in found if path.is_file()))


def page_id(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    for_all = {mark["language"]: mark["what"] for mark in _PAGE_MARK.finditer(text)}
    return list(_blocks(text.splitlines(), for_all))


def examples(page: Path, *languages: str) -> list[Example]:
    """The blocks of these languages that are run here, in order, with their expected output."""
    found = blocks(page)
    chosen = []
    for block, after in zip(found, [*found, None][1:], strict=True):
        if block.language not in languages or block.marked:
            continue
        # The expected output begins on the line below the closing fence.
        end = block.line + len(block.content) + 2
        promises = after is not None and after.language == "text" and after.line == end
        output = after.content if after is not None and promises else ()
        chosen.append(Example(block, tuple(line for line in output if line.strip())))
    return chosen


def links(page: Path) -> list[str]:
    return _LINK.findall(page.read_text(encoding="utf-8"))


def _blocks(lines: list[str], for_all: dict[str, str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        number += 1
        if opened is None:
            continue
        start, indent, ticks = number, len(opened["indent"]), opened["ticks"]
        while lines[number].strip() != ticks:
            number += 1
        mark = _MARK.fullmatch(lines[start - 2].strip()) if start >= 2 else None
        language = opened["language"]
        how, what = (mark["how"], mark["what"]) if mark is not None else ("run by", for_all.get(language, ""))
        yield Block(
            start + 1,
            language,
            tuple(line[indent:] for line in lines[start:number]),
            not_run=what if how == "not run" else "",
            run_by=what if how == "run by" else "",
        )
        number += 1
