"""Parse the text of a condition to a syntax tree, with Postgres's operator precedence.

Invariant: the work is bounded, because the text, the number of nodes and the depth are limited. Anything outside the
grammar raises `UnsupportedError`, with the position.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, cast

from headwater.shapes.where.syntax import (
    Among,
    AnyOf,
    Both,
    Call,
    Cast,
    ColumnName,
    Compare,
    Comparison,
    Constant,
    Distinct,
    Is,
    Like,
    Node,
    Not,
    OrderBy,
    Parameter,
)

TEXT_MAX: Final = 32_768
_NODES_MAX: Final = 4_000
_DEPTH_MAX: Final = 50

TYPE_NAMES: Final = {
    # Postgres's type names, with the aliases that SQL has for them.
    "bool": "bool",
    "boolean": "bool",
    "int2": "int2",
    "smallint": "int2",
    "int4": "int4",
    "int": "int4",
    "integer": "int4",
    "int8": "int8",
    "bigint": "int8",
    "numeric": "numeric",
    "decimal": "numeric",
    "float4": "float4",
    "real": "float4",
    "float8": "float8",
    "text": "text",
    "varchar": "text",
    "uuid": "uuid",
    "date": "date",
    "time": "time",
    "timestamp": "timestamp",
    "timestamptz": "timestamptz",
    "interval": "interval",
}

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<string>'(?:[^']|'')*')
      | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<parameter>\$\d{1,5})
      | (?P<quoted>"(?:[^"]|"")+")
      | (?P<word>[^\W\d][\w$]*)
      | (?P<operator>::|<>|!=|<=|>=|[=<>(),.\[\]-])
      | (?P<end>$)
    )""",
    re.VERBOSE,
)
_COMPARISONS: Final = frozenset(("=", "<>", "<", "<=", ">", ">="))
_RESERVED: Final = frozenset(
    (
        *("all", "and", "any", "array", "as", "asc", "between", "case", "cast", "desc", "distinct", "else", "end"),
        *("exists", "false", "from", "ilike", "in", "is", "like", "not", "null", "or", "select", "similar", "some"),
        *("then", "true", "unknown", "when", "where"),
    )
)


class UnsupportedError(Exception):
    """The condition is not supported; the message says why."""


class _Tokens:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.kind = ""
        self.value = ""
        self.advance()

    def advance(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is None or found.lastgroup is None:
            place = len(self._text[self._at :]) - len(self._text[self._at :].lstrip()) + self._at
            raise UnsupportedError(
                f"unsupported syntax at position {place + 1}, near {self._text[place : place + 20]!r}"
            )
        self.kind = found.lastgroup
        self.value = found[self.kind]
        self._at = found.end()
        if self.kind == "word":
            self.value = self.value.lower()
        elif self.kind == "quoted":
            self.value = self.value[1:-1].replace('""', '"')

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.value in words

    def take_word(self, *words: str) -> bool:
        if self.is_word(*words):
            self.advance()
            return True
        return False

    def is_operator(self, *operators: str) -> bool:
        return self.kind == "operator" and self.value in operators

    def take(self, operator: str) -> bool:
        if self.is_operator(operator):
            self.advance()
            return True
        return False

    def expect(self, operator: str) -> None:
        if not self.take(operator):
            raise self.unexpected()

    def expect_word(self, word: str) -> None:
        if not self.take_word(word):
            raise self.unexpected()

    def unexpected(self) -> UnsupportedError:
        if self.is_word("select", "exists"):
            return UnsupportedError("subqueries are not supported")
        what = f"{self.value!r}" if self.kind != "end" else "the end"
        return UnsupportedError(f"unsupported syntax: unexpected {what}")


class _Parser:
    def __init__(self, text: str, table: str) -> None:
        if len(text) > TEXT_MAX:
            raise UnsupportedError(f"longer than {TEXT_MAX} characters")
        if "\0" in text:
            raise UnsupportedError("a NUL character is not allowed")
        self.tokens = _Tokens(text)
        self._table = table
        self._nodes = 0
        self._depth = 0

    def condition(self) -> Node:
        found = self._or()
        if self.tokens.kind != "end":
            raise self.tokens.unexpected()
        return found

    def order(self) -> tuple[OrderBy, ...]:
        found = []
        while True:
            column = self._column()
            descending = self.tokens.is_word("desc")
            self.tokens.take_word("asc", "desc")
            nulls_first = None
            if self.tokens.take_word("nulls"):
                nulls_first = self.tokens.is_word("first")
                if not self.tokens.take_word("first", "last"):
                    raise self.tokens.unexpected()
            found.append(OrderBy(column.name, descending, nulls_first))
            if not self.tokens.take(","):
                break
        if self.tokens.kind != "end":
            raise self.tokens.unexpected()
        return tuple(found)

    def _made(self, node: Node) -> Node:
        self._nodes += 1
        if self._nodes > _NODES_MAX:
            raise UnsupportedError(f"more than {_NODES_MAX} terms")
        return node

    def _nested(self, parse: Callable[[], Node]) -> Node:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise UnsupportedError(f"nested deeper than {_DEPTH_MAX} levels")
        found = parse()
        self._depth -= 1
        return found

    def _or(self) -> Node:
        parts = [self._and()]
        while self.tokens.take_word("or"):
            parts.append(self._and())
        return parts[0] if len(parts) == 1 else self._made(Both("or", tuple(parts)))

    def _and(self) -> Node:
        parts = [self._not()]
        while self.tokens.take_word("and"):
            parts.append(self._not())
        return parts[0] if len(parts) == 1 else self._made(Both("and", tuple(parts)))

    def _not(self) -> Node:
        if self.tokens.take_word("not"):
            return self._made(Not(self._nested(self._not)))
        return self._is()

    def _is(self) -> Node:
        found = self._comparison()
        while self.tokens.take_word("is"):
            negated = self.tokens.take_word("not")
            if self.tokens.take_word("distinct"):
                self.tokens.expect_word("from")
                found = self._made(Distinct(found, self._comparison(), negated))
                continue
            for what in ("null", "true", "false", "unknown"):
                if self.tokens.take_word(what):
                    found = self._made(Is(found, what, negated))
                    break
            else:
                raise self.tokens.unexpected()
        return found

    def _comparison(self) -> Node:
        left = self._range()
        if self.tokens.kind == "operator" and (operator := _spelled(self.tokens.value)) in _COMPARISONS:
            self.tokens.advance()
            comparison = cast("Comparison", operator)
            if self.tokens.take_word("any", "some"):
                found = self._any(comparison, left)
            else:
                found = self._made(Compare(comparison, left, self._range()))
            if self.tokens.kind == "operator" and _spelled(self.tokens.value) in _COMPARISONS:
                raise self.tokens.unexpected()
            return found
        return left

    def _any(self, operator: Comparison, left: Node) -> Node:
        self.tokens.expect("(")
        if self.tokens.take_word("array"):
            self.tokens.expect("[")
            items = self._items("]")
            self.tokens.expect(")")
            if operator == "=":
                return self._made(Among(left, items, negated=False))
            parts = tuple(self._made(Compare(operator, left, item)) for item in items)
            return parts[0] if len(parts) == 1 else self._made(Both("or", parts))
        array = self._primary()
        self.tokens.expect(")")
        return self._made(AnyOf(operator, left, array))

    def _range(self) -> Node:
        """`BETWEEN`, `IN` and `LIKE` bind more tightly than comparisons."""
        left = self._cast()
        negated = False
        if self.tokens.is_word("not"):
            self.tokens.advance()
            negated = True
            if not self.tokens.is_word("in", "like", "ilike", "between"):
                raise self.tokens.unexpected()
        if self.tokens.take_word("in"):
            self.tokens.expect("(")
            return self._made(Among(left, self._items(")"), negated))
        if self.tokens.is_word("like", "ilike"):
            ignore_case = self.tokens.value == "ilike"
            self.tokens.advance()
            return self._made(Like(left, self._cast(), negated, ignore_case))
        if self.tokens.take_word("between"):
            if self.tokens.is_word("symmetric"):
                raise self.tokens.unexpected()
            low = self._cast()
            self.tokens.expect_word("and")
            high = self._cast()
            parts = (Compare(">=", left, low), Compare("<=", left, high))
            both = self._made(Both("and", parts))
            return self._made(Not(both)) if negated else both
        return left

    def _items(self, closing: str) -> tuple[Node, ...]:
        items = [self._cast()]
        while self.tokens.take(","):
            items.append(self._cast())
        self.tokens.expect(closing)
        return tuple(items)

    def _cast(self) -> Node:
        negative = self.tokens.take("-")
        found = self._primary()
        if negative:
            if not isinstance(found, Constant) or found.kind != "number":
                raise UnsupportedError("arithmetic is not supported")
            found = Constant(f"-{found.text}", "number")
        while self.tokens.take("::"):
            if negative:
                # In Postgres the cast binds more tightly than the minus; the result is the same for values in range.
                negative = False
            found = self._made(Cast(found, self._type()))
        return found

    def _type(self) -> str:
        if self.tokens.kind not in {"word", "quoted"}:
            raise self.tokens.unexpected()
        name = self.tokens.value
        self.tokens.advance()
        if name == "double" and self.tokens.take_word("precision"):
            name = "float8"
        elif name == "character" and self.tokens.take_word("varying"):
            name = "varchar"
        elif name in {"timestamp", "time"} and self.tokens.is_word("with", "without"):
            with_zone = self.tokens.value == "with"
            self.tokens.advance()
            self.tokens.expect_word("time")
            self.tokens.expect_word("zone")
            name += "tz" if with_zone else ""
        if name not in TYPE_NAMES:
            raise UnsupportedError(f"casts to {name} are not supported")
        if self.tokens.is_operator("(", "["):
            raise UnsupportedError(f"casts to {name} with a length, a precision or brackets are not supported")
        return TYPE_NAMES[name]

    def _primary(self) -> Node:
        tokens = self.tokens
        if tokens.kind == "string":
            text = tokens.value[1:-1].replace("''", "'")
            tokens.advance()
            return self._made(Constant(text, "string"))
        if tokens.kind == "number":
            text = tokens.value
            tokens.advance()
            if tokens.kind == "word" and tokens.value not in _RESERVED:
                raise tokens.unexpected()
            return self._made(Constant(text, "number"))
        if tokens.kind == "parameter":
            number = int(tokens.value[1:])
            tokens.advance()
            return self._made(Parameter(number))
        if tokens.take("("):
            found = self._nested(self._or)
            tokens.expect(")")
            return found
        if tokens.kind == "word":
            return self._word()
        if tokens.kind == "quoted":
            return self._made(self._column())
        raise tokens.unexpected()

    def _word(self) -> Node:
        tokens = self.tokens
        if tokens.is_word("true", "false"):
            text = tokens.value
            tokens.advance()
            return self._made(Constant(text, "truth"))
        if tokens.take_word("null"):
            return self._made(Constant(None, "null"))
        if tokens.take_word("cast"):
            tokens.expect("(")
            inner = self._nested(self._or)
            tokens.expect_word("as")
            type_name = self._type()
            tokens.expect(")")
            return self._made(Cast(inner, type_name))
        if tokens.value in _RESERVED:
            raise tokens.unexpected()
        name = tokens.value
        tokens.advance()
        if tokens.kind == "string" and name in TYPE_NAMES:
            # DATE '2026-01-31'
            text = tokens.value[1:-1].replace("''", "'")
            tokens.advance()
            return self._made(Cast(Constant(text, "string"), TYPE_NAMES[name]))
        if tokens.is_operator("("):
            if name not in {"lower", "upper"}:
                raise UnsupportedError(f"the function {name} is not supported")
            tokens.advance()
            inner = self._nested(self._or)
            tokens.expect(")")
            return self._made(Call(name, inner))  # type: ignore[arg-type]  # checked above
        return self._made(self._qualified(name))

    def _column(self) -> ColumnName:
        if self.tokens.kind not in {"word", "quoted"} or self.tokens.is_word(*_RESERVED):
            raise self.tokens.unexpected()
        name = self.tokens.value
        self.tokens.advance()
        return self._qualified(name)

    def _qualified(self, name: str) -> ColumnName:
        if not self.tokens.take("."):
            return ColumnName(name)
        if name != self._table or self.tokens.kind not in {"word", "quoted"}:
            raise UnsupportedError(f"unknown table {name} in a condition on {self._table}")
        column = self.tokens.value
        self.tokens.advance()
        return ColumnName(column)


def parse_condition(text: str, table: str) -> Node:
    """Parse a condition on a table of this (unqualified) name."""
    return _Parser(text, table).condition()


def parse_order(text: str, table: str) -> tuple[OrderBy, ...]:
    """Parse the columns of an ORDER BY."""
    return _Parser(text, table).order()


def _spelled(operator: str) -> str:
    return "<>" if operator == "!=" else operator
