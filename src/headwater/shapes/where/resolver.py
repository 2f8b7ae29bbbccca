"""Resolve the types of a condition: columns have types, and constants get the type of what they are compared with.

Constants and parameters remain data: each becomes a numbered value with a type, which Postgres parses once when the
shape is created. Invariant: a resolved condition cannot fail on any row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from headwater.shapes.where import syntax
from headwater.shapes.where.parser import UnsupportedError
from headwater.shapes.where.values import (
    CONVERSIONS,
    ENUM,
    FLOATS,
    INTEGERS,
    KINDS,
    TEXTS,
    converts_implicitly,
)

_INT4_MAX: Final = 2**31 - 1
_INT8_MAX: Final = 2**63 - 1
VALUES_MAX: Final = 2_000


@dataclass(frozen=True, slots=True)
class WhereColumn:
    """A column that a condition may use."""

    name: str
    kind: str
    """One of `values.KINDS`, `enum`, or empty if conditions cannot use the type."""
    type_sql: str
    """The SQL name of the type; from the catalog, never from a request."""
    is_deterministic: bool = True
    """Whether the collation is deterministic: only identical texts are equal."""


@dataclass(frozen=True, slots=True)
class Value:
    """A constant: index `number` in `Condition.values`."""

    number: int
    kind: str
    type_sql: str


@dataclass(frozen=True, slots=True)
class Field:
    column: WhereColumn

    @property
    def kind(self) -> str:
        return self.column.kind


@dataclass(frozen=True, slots=True)
class Converted:
    of: Scalar
    kind: str


@dataclass(frozen=True, slots=True)
class Folded:
    """lower() or upper(), of ASCII letters only."""

    of: Scalar
    function: Literal["lower", "upper"]
    kind: str = "text"


Scalar: TypeAlias = Value | Field | Converted | Folded


@dataclass(frozen=True, slots=True)
class Truth:
    """A scalar of type bool as a condition."""

    of: Scalar


@dataclass(frozen=True, slots=True)
class Compared:
    operator: syntax.Comparison
    left: Scalar
    right: Scalar
    kind: str


@dataclass(frozen=True, slots=True)
class ComparedTruths:
    """A comparison of two conditions, such as `true = true` or `(a > 1) = (b > 1)`."""

    operator: syntax.Comparison
    left: Test
    right: Test


@dataclass(frozen=True, slots=True)
class Differs:
    left: Scalar
    right: Scalar
    kind: str
    negated: bool


@dataclass(frozen=True, slots=True)
class AmongArray:
    operator: syntax.Comparison
    left: Scalar
    array: Value
    kind: str


@dataclass(frozen=True, slots=True)
class Matches:
    left: Scalar
    pattern: Value
    negated: bool
    ignore_case: bool


@dataclass(frozen=True, slots=True)
class IsMissing:
    of: Scalar
    negated: bool


@dataclass(frozen=True, slots=True)
class IsTruth:
    of: Test
    what: Literal["true", "false", "unknown"]
    negated: bool


@dataclass(frozen=True, slots=True)
class Negated:
    of: Test


@dataclass(frozen=True, slots=True)
class Joined:
    operator: Literal["and", "or"]
    parts: tuple[Test, ...]


Test: TypeAlias = (
    Truth | Compared | ComparedTruths | Differs | AmongArray | Matches | IsMissing | IsTruth | Negated | Joined
)


@dataclass(frozen=True, slots=True)
class Typed:
    """The text of a value and the type that reads it."""

    text: str | None
    type_sql: str
    pattern: bool = False


@dataclass(frozen=True, slots=True)
class Condition:
    test: Test
    values: tuple[Typed, ...]
    columns: frozenset[str]
    """The columns that it reads."""


@dataclass(slots=True)
class _Unknown:
    """A string or a parameter that has no type yet."""

    text: str | None


_Operand: TypeAlias = Scalar | _Unknown


@dataclass(slots=True)
class _Resolver:
    columns: Mapping[str, WhereColumn]
    parameters: Mapping[str, str]
    values: list[Typed] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    # -- conditions ----------------------------------------------------------------------------------------------

    def test(self, node: syntax.Node) -> Test:
        match node:
            case syntax.Both():
                return Joined(node.operator, tuple(self.test(part) for part in node.parts))
            case syntax.Not():
                return Negated(self.test(node.of))
            case syntax.Compare():
                return self._comparison(node)
            case syntax.Distinct():
                left, right, kind = self._alike(self._operand(node.left), self._operand(node.right), "=")
                return Differs(left, right, kind, node.negated)
            case syntax.Among():
                parts = tuple(self.test(syntax.Compare("=", node.left, item)) for item in node.items)
                among: Test = parts[0] if len(parts) == 1 else Joined("or", parts)
                return Negated(among) if node.negated else among
            case syntax.AnyOf():
                return self._any(node)
            case syntax.Like():
                return self._like(node)
            case syntax.Is():
                return self._is(node)
            case _:
                found = self._typed(self._operand(node), "bool")
                if found.kind != "bool":
                    raise UnsupportedError(f"a condition must be of type bool, not {found.kind}")
                return Truth(found)

    def _comparison(self, node: syntax.Compare) -> Test:
        if _is_test(node.left) or _is_test(node.right):
            return ComparedTruths(node.operator, self.test(node.left), self.test(node.right))
        left, right, kind = self._alike(self._operand(node.left), self._operand(node.right), node.operator)
        return Compared(node.operator, left, right, kind)

    def _any(self, node: syntax.AnyOf) -> Test:
        left = self._typed(self._operand(node.left), "text")
        array = self._operand(node.array)
        if not isinstance(array, _Unknown):
            raise UnsupportedError("ANY takes an array in quotes, a parameter, or ARRAY[…]")
        self._check_order(node.operator, left)
        type_sql = _type_of(left)
        # `char(n)` compares without trailing blanks, for any length.
        return AmongArray(node.operator, left, self._value(array.text, left.kind, f"{type_sql}[]"), left.kind)

    def _like(self, node: syntax.Like) -> Test:
        left = self._typed(self._operand(node.left), "text")
        if left.kind not in TEXTS:
            raise UnsupportedError(f"LIKE needs text, not {left.kind}")
        self._check_collation(left)
        pattern = self._operand(node.pattern)
        if not isinstance(pattern, _Unknown):
            raise UnsupportedError("the pattern of LIKE must be a string or a parameter")
        if pattern.text is not None and _ends_with_escape(pattern.text):
            raise UnsupportedError("LIKE pattern must not end with escape character")
        value = self._value(pattern.text, "text", "text", pattern=True)
        return Matches(left, value, node.negated, node.ignore_case)

    def _is(self, node: syntax.Is) -> Test:
        if node.what == "null":
            if _is_test(node.of):
                return IsTruth(self.test(node.of), "unknown", node.negated)
            return IsMissing(self._typed(self._operand(node.of), "text"), node.negated)
        return IsTruth(self.test(node.of), node.what, node.negated)

    # -- operands ------------------------------------------------------------------------------------------------

    def _operand(self, node: syntax.Node) -> _Operand:
        match node:
            case syntax.ColumnName():
                return Field(self._column(node.name))
            case syntax.Constant(kind="number"):
                assert node.text is not None
                kind = _number_kind(node.text)
                return self._value(node.text, kind, kind)
            case syntax.Constant(kind="truth"):
                return self._value(node.text, "bool", "bool")
            case syntax.Constant():
                return _Unknown(node.text)
            case syntax.Parameter():
                text = self.parameters.get(str(node.number))
                if text is None:
                    raise UnsupportedError(f"parameter ${node.number} was not provided")
                return _Unknown(text)
            case syntax.Cast():
                return self._cast(self._operand(node.of), node.type_name)
            case syntax.Call():
                of = self._typed(self._operand(node.of), "text")
                if of.kind not in TEXTS:
                    raise UnsupportedError(f"{node.function} needs text, not {of.kind}")
                return Folded(self._as(of, "text"), node.function)
            case _:
                raise UnsupportedError("a condition cannot be used as a value here")

    def _column(self, name: str) -> WhereColumn:
        column = self.columns.get(name)
        if column is None:
            raise UnsupportedError(f"unknown column {name}")
        if not column.kind:
            raise UnsupportedError(f"conditions on columns of type {column.type_sql} are not supported")
        self.used.add(name)
        return column

    def _cast(self, of: _Operand, kind: str) -> Scalar:
        if isinstance(of, _Unknown):
            return self._value(of.text, kind, kind)
        if of.kind == kind:
            return of
        if isinstance(of, Value):
            typed = self.values[of.number]
            if converts_implicitly(of.kind, kind) or of.kind in {*INTEGERS, "numeric"}:
                return self._value(typed.text, kind, kind)
        if kind == "text" or (of.kind, kind) in CONVERSIONS:
            if kind == "text" and not isinstance(of, Field):
                raise UnsupportedError("only a column can be cast to text")
            return Converted(of, kind)
        raise UnsupportedError(f"a cast from {of.kind} to {kind} is not supported: it could fail for some rows")

    def _alike(self, left: _Operand, right: _Operand, operator: str) -> tuple[Scalar, Scalar, str]:
        """Both sides, with the type in which Postgres compares them."""
        if isinstance(left, _Unknown):
            if isinstance(right, _Unknown):
                return self._typed(left, "text"), self._typed(right, "text"), "text"
            left = self._like_other(left, right)
        elif isinstance(right, _Unknown):
            right = self._like_other(right, left)
        kind = _common_kind(left, right)
        for side in (left, right):
            self._check_order(operator, side)
        return self._as(left, kind), self._as(right, kind), kind

    def _like_other(self, unknown: _Unknown, other: Scalar) -> Value:
        return self._value(unknown.text, other.kind, _type_of(other))

    def _as(self, of: Scalar, kind: str) -> Scalar:
        return of if of.kind == kind else Converted(of, kind)

    def _typed(self, operand: _Operand, default: str) -> Scalar:
        return self._value(operand.text, default, default) if isinstance(operand, _Unknown) else operand

    def _check_order(self, operator: str, of: Scalar) -> None:
        if of.kind == ENUM and operator not in {"=", "<>"}:
            raise UnsupportedError("values of an enum can be compared with = and <> only")
        self._check_collation(of)

    def _check_collation(self, of: Scalar) -> None:
        if isinstance(of, Field) and not of.column.is_deterministic:
            raise UnsupportedError(f"column {of.column.name} has a nondeterministic collation")

    def _value(self, text: str | None, kind: str, type_sql: str, *, pattern: bool = False) -> Value:
        if len(self.values) >= VALUES_MAX:
            raise UnsupportedError(f"more than {VALUES_MAX} constants")
        if text is not None and "\0" in text:
            raise UnsupportedError("a NUL character is not allowed")
        self.values.append(Typed(text, type_sql, pattern))
        return Value(len(self.values) - 1, kind, type_sql)


def resolve_condition(
    node: syntax.Node, columns: Mapping[str, WhereColumn], parameters: Mapping[str, str]
) -> Condition:
    """Resolve the types of a condition; raises `UnsupportedError`."""
    resolver = _Resolver(columns, parameters)
    test = resolver.test(node)
    return Condition(test, tuple(resolver.values), frozenset(resolver.used))


def resolve_order(order: Sequence[syntax.OrderBy], is_column: Callable[[str], bool]) -> tuple[syntax.OrderBy, ...]:
    """Check that all names in an ORDER BY are columns."""
    for one in order:
        if not is_column(one.column):
            raise UnsupportedError(f"unknown column {one.column}")
    return tuple(order)


def _is_test(node: syntax.Node) -> bool:
    return isinstance(
        node,
        syntax.Compare
        | syntax.Distinct
        | syntax.Among
        | syntax.AnyOf
        | syntax.Like
        | syntax.Is
        | syntax.Not
        | syntax.Both,
    )


def _number_kind(text: str) -> str:
    if not text.removeprefix("-").isdigit():
        return "numeric"
    size = abs(int(text))
    return "int4" if size <= _INT4_MAX else "int8" if size <= _INT8_MAX else "numeric"


def _type_of(of: Scalar) -> str:
    if isinstance(of, Value):
        return of.type_sql
    return of.column.type_sql if isinstance(of, Field) and of.kind == ENUM else of.kind


def _common_kind(left: Scalar, right: Scalar) -> str:
    a, b = left.kind, right.kind
    if ENUM in {a, b}:
        if a == b and _type_of(left) == _type_of(right):
            return ENUM
    elif a == b:
        return a
    elif a in FLOATS and b in FLOATS:
        return "float8"
    else:
        numbers = {*INTEGERS, "numeric", *FLOATS}
        if a in numbers and b in numbers:
            if a in FLOATS or b in FLOATS:
                return "float8"
            return max(a, b, key=("int2", "int4", "int8", "numeric").index)
        if a in TEXTS and b in TEXTS:
            return "text"
        for source, target in ((a, b), (b, a)):
            if source in KINDS and converts_implicitly(source, target) and {a, b} <= _MOMENTS:
                return target
    raise UnsupportedError(f"cannot compare {a} with {b}")


_MOMENTS: Final = {"date", "timestamp", "timestamptz"}


def _ends_with_escape(pattern: str) -> bool:
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1
