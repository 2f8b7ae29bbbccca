"""Compile a resolved condition to a function of a row, in three-valued logic.

A row is the text of each column, as replication sends it. Invariant: the result is `True` for exactly the rows that the
rendered SQL selects.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from headwater.postgres.values import parse_array
from headwater.shapes.where import resolver as resolved
from headwater.shapes.where.values import CONVERSIONS, READERS, order_key, spelled_as_text

Row = Mapping[str, str | None]
Predicate = Callable[[Row], bool]
_Test = Callable[[Row], bool | None]
_Scalar = Callable[[Row], Any]

_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ASCII_LOWER: Final = {ord(upper): ord(upper) + 32 for upper in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
_ASCII_UPPER: Final = {lower: upper for upper, lower in _ASCII_LOWER.items()}


def compile_condition(condition: resolved.Condition, values: Sequence[str | None]) -> Predicate:
    """Compile a condition; `values` are its constants in Postgres's notation."""
    test = _Compiler(values).test(condition.test)
    return lambda row: test(row) is True


class _Compiler:
    def __init__(self, values: Sequence[str | None]) -> None:
        self._values = values

    def test(self, test: resolved.Test) -> _Test:
        match test:
            case resolved.Joined():
                return _joined(test.operator, [self.test(part) for part in test.parts])
            case resolved.Negated():
                return _negated(self.test(test.of))
            case resolved.Truth():
                return self.scalar(test.of)
            case resolved.Compared():
                return _compared(_OPERATORS[test.operator], self._keyed(test.left), self._keyed(test.right))
            case resolved.ComparedTruths():
                return _compared(_OPERATORS[test.operator], self.test(test.left), self.test(test.right))
            case resolved.Differs():
                return _differs(self._keyed(test.left), self._keyed(test.right), negated=test.negated)
            case resolved.AmongArray():
                return self._among(test)
            case resolved.Matches():
                return self._matches(test)
            case resolved.IsMissing():
                return _is_missing(self.scalar(test.of), negated=test.negated)
            case resolved.IsTruth():
                return _is_truth(self.test(test.of), test.what, negated=test.negated)

    def _among(self, test: resolved.AmongArray) -> _Test:
        left, compare = self._keyed(test.left), _OPERATORS[test.operator]
        text = self._values[test.array.number]
        if text is None:
            return lambda _: None
        key, read = order_key(test.kind), READERS[test.kind]
        flat = list(_flat(parse_array(text, read)))
        keys = [key(item) for item in flat if item is not None]
        otherwise = None if len(keys) < len(flat) else False
        if test.operator == "=":
            found = frozenset(keys)

            def is_in(row: Row) -> bool | None:
                value = left(row)
                if value is None:
                    return None if flat else False
                return True if value in found else otherwise

            return is_in

        def is_any(row: Row) -> bool | None:
            value = left(row)
            if value is None:
                return None if flat else False
            return True if any(compare(value, other) for other in keys) else otherwise

        return is_any

    def _matches(self, test: resolved.Matches) -> _Test:
        left, pattern = self.scalar(test.left), self._values[test.pattern.number]
        if pattern is None:
            return lambda _: None
        if test.ignore_case:
            pattern = pattern.translate(_ASCII_LOWER)
        matches = _like(pattern)
        ignore_case, negated = test.ignore_case, test.negated

        def run(row: Row) -> bool | None:
            text = left(row)
            if text is None:
                return None
            found = matches(text.translate(_ASCII_LOWER) if ignore_case else text)
            return found is not negated

        return run

    def _keyed(self, scalar: resolved.Scalar) -> _Scalar:
        """A scalar whose values are the comparison keys."""
        value, key = self.scalar(scalar), order_key(scalar.kind)

        def run(row: Row) -> Any:
            found = value(row)
            return None if found is None else key(found)

        if isinstance(scalar, resolved.Value):
            constant = run({})
            return lambda _: constant
        return run

    def scalar(self, scalar: resolved.Scalar) -> _Scalar:
        match scalar:
            case resolved.Value():
                text = self._values[scalar.number]
                constant = None if text is None else READERS[scalar.kind](text)
                return lambda _: constant
            case resolved.Field():
                return _read(scalar.column.name, READERS[scalar.column.kind])
            case resolved.Converted(of=resolved.Field() as field, kind="text"):
                return _read(field.column.name, spelled_as_text(field.kind))
            case resolved.Converted():
                return _converted(self.scalar(scalar.of), CONVERSIONS[scalar.of.kind, scalar.kind])
            case resolved.Folded():
                table = _ASCII_LOWER if scalar.function == "lower" else _ASCII_UPPER
                return _converted(self.scalar(scalar.of), lambda text: text.translate(table))


def _read(name: str, read: Callable[[str], Any]) -> _Scalar:
    def run(row: Row) -> Any:
        text = row[name]
        return None if text is None else read(text)

    return run


def _converted(of: _Scalar, convert: Callable[[Any], Any]) -> _Scalar:
    def run(row: Row) -> Any:
        value = of(row)
        return None if value is None else convert(value)

    return run


def _joined(word: str, parts: list[_Test]) -> _Test:
    decisive = word == "or"

    def run(row: Row) -> bool | None:
        answer: bool | None = not decisive
        for part in parts:
            found = part(row)
            if found is decisive:
                return decisive
            if found is None:
                answer = None
        return answer

    return run


def _negated(of: _Test) -> _Test:
    def run(row: Row) -> bool | None:
        found = of(row)
        return None if found is None else not found

    return run


def _compared(compare: Callable[[Any, Any], bool], left: _Scalar, right: _Scalar) -> _Test:
    def run(row: Row) -> bool | None:
        a, b = left(row), right(row)
        return None if a is None or b is None else compare(a, b)

    return run


def _differs(left: _Scalar, right: _Scalar, *, negated: bool) -> _Test:
    return lambda row: (left(row) != right(row)) is not negated


def _is_missing(of: _Scalar, *, negated: bool) -> _Test:
    return lambda row: (of(row) is None) is not negated


def _is_truth(of: _Test, what: str, *, negated: bool) -> _Test:
    wanted = {"true": True, "false": False, "unknown": None}[what]
    return lambda row: (of(row) is wanted) is not negated


def _like(pattern: str) -> Callable[[str], bool]:
    """Compile a LIKE pattern: `%` is any text, `_` any character, and a backslash escapes the next character.

    The pieces between percent signs are matched from left to right, so the cost is at most the product of the two
    lengths.
    """
    pieces = [""]
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "%":
            pieces.append("")
        elif letter == "_":
            pieces[-1] += "."
        else:
            at += letter == "\\"
            pieces[-1] += re.escape(pattern[at])
        at += 1
    compiled = [re.compile(piece, re.DOTALL) for piece in pieces]
    first, middle, last = compiled[0], [piece for piece in compiled[1:-1] if piece.pattern], compiled[-1]
    last_length = len(re.sub(r"\\(.)", r"\1", last.pattern, flags=re.DOTALL))

    def matches(text: str) -> bool:
        if len(compiled) == 1:
            return first.fullmatch(text) is not None
        found = first.match(text)
        for piece in middle:
            if found is None:
                return False
            found = piece.search(text, found.end())
        end = len(text) - last_length
        return found is not None and found.end() <= end and last.match(text, end) is not None

    return matches


def _flat(items: list[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        found.extend(_flat(item) if isinstance(item, list) else [item])
    return found
