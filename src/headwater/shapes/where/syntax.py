"""The syntax tree of a condition, before its types are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Comparison = Literal["=", "<>", "<", "<=", ">", ">="]


@dataclass(frozen=True, slots=True)
class ColumnName:
    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal. A string has no type until it is resolved."""

    text: str | None
    kind: Literal["string", "number", "truth", "null"]


@dataclass(frozen=True, slots=True)
class Parameter:
    number: int


@dataclass(frozen=True, slots=True)
class Cast:
    of: Node
    type_name: str


@dataclass(frozen=True, slots=True)
class Compare:
    operator: Comparison
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Distinct:
    left: Node
    right: Node
    negated: bool


@dataclass(frozen=True, slots=True)
class Among:
    """`left IN (…)`."""

    left: Node
    items: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class AnyOf:
    """`left = ANY (array)`, with a constant array."""

    operator: Comparison
    left: Node
    array: Node


@dataclass(frozen=True, slots=True)
class Like:
    left: Node
    pattern: Node
    negated: bool
    ignore_case: bool


@dataclass(frozen=True, slots=True)
class Is:
    """`of IS [NOT] NULL | TRUE | FALSE | UNKNOWN`."""

    of: Node
    what: Literal["null", "true", "false", "unknown"]
    negated: bool


@dataclass(frozen=True, slots=True)
class Not:
    of: Node


@dataclass(frozen=True, slots=True)
class Both:
    """`AND` or `OR` of two or more."""

    operator: Literal["and", "or"]
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Call:
    function: Literal["lower", "upper"]
    of: Node


Node: TypeAlias = (
    ColumnName | Constant | Parameter | Cast | Compare | Distinct | Among | AnyOf | Like | Is | Not | Both | Call
)


@dataclass(frozen=True, slots=True)
class OrderBy:
    column: str
    descending: bool
    nulls_first: bool | None
