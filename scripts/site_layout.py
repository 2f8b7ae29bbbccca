"""Mark what the style sheet of the documentation site lays out differently on a phone (a hook of MkDocs).

A table of sentences does not fit: its last column is outside the screen, and its rows are tall and look empty. It is
shown as one block per row, each cell with the name of its column. Tables of numbers, and diagrams, scroll sideways.
"""

from __future__ import annotations

import html
import itertools
import re

_BLOCK = re.compile(r'<div class="language-text highlight">(.*?)</div>', re.DOTALL)
_TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<(t[dh])([^>]*)>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")

_ARROWS = re.compile("[─│►◄]")
_CODE = re.compile(r"(?<!<pre><span></span>)<code>([^<]*)</code>")
"""Code within a sentence. A block of code keeps its lines as they are: a possible break splits a diagram."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_WORD_END = re.compile(r"(?<=[/_:.])(?=\w)")

ROW_CHARACTERS = 42
"""What a phone shows of a row."""
CELL_CHARACTERS = 24
"""Cells up to this length are names and numbers, which are compared by column."""
CODE_CHARACTERS = 26
"""Code up to this length stays on one line: `--all` must not be split after its first hyphen."""
_NUMBERS = re.compile(r"[\d.,() to-]+")


def on_page_content(content: str, **_: object) -> str:
    tables = _TABLE.sub(lambda table: _ROW.sub(_split_code, _mark_table(table)), content)
    return _CODE.sub(_mark_code, _BLOCK.sub(_mark_diagram, tables))


def _mark_code(code: re.Match[str]) -> str:
    """Keep short code in one piece, and split long code between its words."""
    if len(html.unescape(code[1])) <= CODE_CHARACTERS:
        return f"<code data-short>{code[1]}</code>"
    return f"<code>{_WORD_END.sub('<wbr>', code[1])}</code>"


def _split_code(row: re.Match[str]) -> str:
    """Split code in the cells of a row between its words, except in the first: that is the name of the row."""
    cells = itertools.count()

    def split(cell: re.Match[str]) -> str:
        end = "" if next(cells) == 0 else "<wbr>"
        body = _CODE.sub(lambda code: f"<code data-cell>{_WORD_END.sub(end, code[1])}</code>", cell[3])
        return f"<{cell[1]}{cell[2]}>{body}</{cell[1]}>"

    return _CELL.sub(split, row[0])


def _mark_diagram(block: re.Match[str]) -> str:
    return block[0].replace("<div", "<div data-diagram", 1) if _ARROWS.search(block[1]) else block[0]


def _mark_table(table: re.Match[str]) -> str:
    rows = [[_text(cell[3]) for cell in _CELL.finditer(row[1])] for row in _ROW.finditer(table[0])]
    names = rows[0]
    longest = [max((_width(cell) for cell in column), default=0) for column in zip(*rows[1:], strict=False)]
    if sum(longest) <= ROW_CHARACTERS or max(longest) <= CELL_CHARACTERS:
        return table[0]
    return _ROW.sub(lambda row: _name_cells(row[0], names), table[0]).replace("<table>", "<table data-stacked>", 1)


def _width(cell: str) -> int:
    """The length of a cell; a number with its range wraps well."""
    return min(len(cell), CELL_CHARACTERS) if _NUMBERS.fullmatch(cell) else len(cell)


def _name_cells(row: str, names: list[str]) -> str:
    columns = iter(names)

    def name(cell: re.Match[str]) -> str:
        column = next(columns, "")
        if cell[1] == "th" or not _text(cell[3]) or not column:
            return cell[0]
        date = " data-date" if _DATE.fullmatch(_text(cell[3])) else ""
        return f'<td{cell[2]} data-column="{html.escape(column)}"{date}>{cell[3]}</td>'

    return _CELL.sub(name, row)


def _text(fragment: str) -> str:
    return html.unescape(_TAG.sub("", fragment)).strip()
