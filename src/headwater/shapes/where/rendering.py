"""Render a resolved condition as SQL with parameters. Names are from the catalog and quoted; values are bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.shapes.where import resolver as resolved
from headwater.shapes.where.syntax import OrderBy
from headwater.shapes.where.values import TEXTS

_ORDERING = frozenset(("<", "<=", ">", ">="))


@dataclass(frozen=True, slots=True)
class Rendered:
    """SQL for psycopg: `%s` for each parameter."""

    sql: str
    parameters: tuple[str | None, ...]


def quoted(name: str) -> str:
    """Quote an identifier for a query with parameters, in which percent signs are doubled."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


@dataclass(slots=True)
class _Renderer:
    values: Sequence[resolved.Typed]
    parameters: list[str | None] = field(default_factory=list)

    def test(self, test: resolved.Test) -> str:
        match test:
            case resolved.Joined():
                joint = " AND " if test.operator == "and" else " OR "
                return "(" + joint.join(map(self.test, test.parts)) + ")"
            case resolved.Negated():
                return f"(NOT {self.test(test.of)})"
            case resolved.Truth():
                return self.scalar(test.of)
            case resolved.Compared():
                return self._compared(test)
            case resolved.ComparedTruths():
                return f"({self.test(test.left)} {test.operator} {self.test(test.right)})"
            case resolved.Differs():
                word = "IS NOT DISTINCT FROM" if test.negated else "IS DISTINCT FROM"
                return f"({self.scalar(test.left)} {word} {self.scalar(test.right)})"
            case resolved.AmongArray():
                left = self._sortable(test.left, test.operator)
                return f"({left} {test.operator} ANY ({self.scalar(test.array)}))"
            case resolved.Matches():
                collation = ' COLLATE "C"' if test.ignore_case else ""
                word = ("NOT " if test.negated else "") + ("ILIKE" if test.ignore_case else "LIKE")
                return f"({self.scalar(test.left)}{collation} {word} {self.scalar(test.pattern)})"
            case resolved.IsMissing():
                return f"({self.scalar(test.of)} IS {'NOT ' if test.negated else ''}NULL)"
            case resolved.IsTruth():
                return f"({self.test(test.of)} IS {'NOT ' if test.negated else ''}{test.what.upper()})"

    def _compared(self, test: resolved.Compared) -> str:
        left = self._sortable(test.left, test.operator)
        return f"({left} {test.operator} {self.scalar(test.right)})"

    def _sortable(self, of: resolved.Scalar, operator: str) -> str:
        # Text is ordered by code points, as in the evaluator. Equality is the same in every supported collation.
        return self.scalar(of) + (' COLLATE "C"' if of.kind in TEXTS and operator in _ORDERING else "")

    def scalar(self, scalar: resolved.Scalar) -> str:
        match scalar:
            case resolved.Field():
                return quoted(scalar.column.name)
            case resolved.Value():
                self.parameters.append(self.values[scalar.number].text)
                return f"%s::{scalar.type_sql}"
            case resolved.Converted():
                return f"({self.scalar(scalar.of)})::{scalar.kind}"
            case resolved.Folded():
                return f'{scalar.function}({self.scalar(scalar.of)} COLLATE "C")'


def render_condition(condition: resolved.Condition) -> Rendered:
    renderer = _Renderer(condition.values)
    sql = renderer.test(condition.test)
    return Rendered(sql, tuple(renderer.parameters))


def render_order(order: Sequence[OrderBy]) -> str:
    """The list after ORDER BY; the columns were checked against the catalog."""
    nulls = {None: "", True: " NULLS FIRST", False: " NULLS LAST"}
    return ", ".join(
        f"{quoted(one.column)}{' DESC' if one.descending else ''}{nulls[one.nulls_first]}" for one in order
    )
