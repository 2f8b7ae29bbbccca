"""Random rows, conditions and changes, from a seed, over every type that conditions can use."""

from __future__ import annotations

import random
from typing import Any

TABLE = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE DOMAIN score AS integer;
CREATE TABLE {table} (
  id int PRIMARY KEY,
  flag boolean, small smallint, number integer, big bigint, amount numeric, precise numeric(8, 2),
  single real, double double precision, label text COLLATE "C", name varchar(20) COLLATE "C",
  code char(6) COLLATE "C", uid uuid, day date, clock time, moment timestamp, instant timestamptz, span interval,
  state mood, points score
)
"""

VALUES: dict[str, list[str | None]] = {
    "flag": ["true", "false"],
    "small": ["-3", "0", "1", "2", "7", "32767"],
    "number": ["-5", "0", "1", "2", "3", "10", "2147483647"],
    "big": ["-9007199254740993", "0", "1", "3", "9007199254740993"],
    "amount": ["-1.50", "0", "1", "1.0", "2.5", "0.1", "NaN", "123456789012345678901234567890.5"],
    "precise": ["0.10", "1.00", "2.50", "-7.25"],
    "single": ["0.1", "1", "2.5", "NaN", "Infinity", "-Infinity", "3.4e38"],
    "double": ["0.1", "1", "2.5", "NaN", "Infinity", "-0", "1e300"],
    "label": ["", "a", "A", "ab", "abc", "a%c", "a_c", "é", "É", "z", "Zebra", " a ", "a\nb", "it's", "\\"],
    "name": ["", "a", "A", "ab", "abc", "a%c", "zürich"],
    "code": ["", "a", "ab", "abc", "a b", "abcdef"],
    "uid": ["00000000-0000-0000-0000-000000000001", "f47ac10b-58cc-4372-a567-0e02b2c3d479"],
    "day": ["2024-02-29", "1999-12-31", "infinity", "-infinity", "0044-03-15 BC", "12024-01-01", "1970-01-01"],
    "clock": ["00:00", "12:34:56.789", "23:59:59.999999", "24:00:00"],
    "moment": ["2024-02-29 12:00:00.5", "1999-12-31 23:59:59", "infinity", "0044-03-15 10:00:00 BC", "2024-02-29"],
    "instant": ["2024-02-29 12:00:00+02", "1999-12-31 23:59:59.000001Z", "-infinity", "2024-02-29 00:00:00Z"],
    "span": ["1 day", "24:00:00", "1 month", "30 days", "-1 year 2 days", "0", "1.5 seconds", "-00:00:01.25"],
    "state": ["sad", "ok", "happy"],
    "points": ["0", "5", "10"],
}
COLUMNS = list(VALUES)
_TEXTS = ("label", "name", "code")
_NUMBERS = ("small", "number", "big", "amount", "precise", "single", "double", "points")
_MOMENTS = ("day", "moment", "instant")
_PATTERNS = ["%", "a%", "%a", "%b%", "_", "a_c", r"a\%c", r"a\_c", "%é%", "", "%a%c%", "A%", "_b%", "%%", "ab__%"]
_OPERATORS = ["=", "<>", "!=", "<", "<=", ">", ">="]
_CASTS = [
    ("number", "bigint"),
    ("number", "numeric"),
    ("small", "float8"),
    ("single", "double precision"),
    ("amount", "float8"),
    ("day", "timestamp"),
    ("moment", "date"),
    ("instant", "date"),
    ("flag", "int"),
]


def literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


class Conditions:
    """Conditions as text, with their parameters."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.parameters: dict[str, str] = {}

    def condition(self, depth: int = 3) -> str:
        pick = self._chance.random()
        if depth <= 0 or pick < 0.5:
            return self._simple()
        if pick < 0.7:
            return f"({self.condition(depth - 1)} AND {self.condition(depth - 1)})"
        if pick < 0.9:
            return f"{self.condition(depth - 1)} OR {self.condition(depth - 1)}"
        return f"NOT ({self.condition(depth - 1)})"

    def _value(self, column: str) -> str:
        value = self._chance.choice(VALUES[column])
        assert value is not None
        if self._chance.random() < 0.3:
            number = str(len(self.parameters) + 1)
            self.parameters[number] = value
            return f"${number}"
        if column in ("small", "number", "big", "amount", "double") and value.lstrip("-").replace(".", "").isdigit():
            return value
        return literal(value)

    def _operator(self, column: str) -> str:
        return self._chance.choice(["=", "<>"] if column == "state" else _OPERATORS)

    def _simple(self) -> str:
        chance = self._chance
        column = chance.choice(COLUMNS)
        kinds: list[Any] = [
            lambda: f"{column} {self._operator(column)} {self._value(column)}",
            lambda: f"{column} IS {chance.choice(['', 'NOT '])}NULL",
            lambda: f"{column} {chance.choice(['', 'NOT '])}IN ({self._value(column)}, {self._value(column)}, NULL)",
            lambda: f"{column} {chance.choice(['', 'NOT '])}IN ({self._value(column)}, {self._value(column)})",
            lambda: f"{column} IS {chance.choice(['', 'NOT '])}DISTINCT FROM {self._value(column)}",
            self._like,
            lambda: self._any(column),
            lambda: self._between(column),
            self._pair,
            self._cast,
            lambda: f"flag IS {chance.choice(['', 'NOT '])}{chance.choice(['TRUE', 'FALSE', 'UNKNOWN'])}",
            lambda: chance.choice(["flag", "NOT flag", "true", "true = true", "(number > 1) = flag"]),
            lambda: f"{chance.choice(['lower', 'upper'])}(label) = {literal(chance.choice(['a', 'A', 'ab', 'é']))}",
            lambda: f"{column}::text = {literal(str(chance.choice(VALUES[column])))}",
        ]
        return str(chance.choice(kinds)())

    def _like(self) -> str:
        words = ["LIKE", "NOT LIKE", "ILIKE", "NOT ILIKE"]
        return f"{self._chance.choice(_TEXTS)} {self._chance.choice(words)} {literal(self._chance.choice(_PATTERNS))}"

    def _any(self, column: str) -> str:
        if column == "state":
            return "state = ANY ('{ok,sad}')"
        if column in _TEXTS:
            return f"{column} = ANY (ARRAY[{self._value(column)}, {self._value(column)}])"
        number = str(len(self.parameters) + 1)
        chosen = [str(self._chance.choice(VALUES[column])) for _ in range(3)]
        self.parameters[number] = "{" + ",".join(f'"{value}"' for value in chosen) + "}"
        return f"{column} {self._operator(column)} ANY (${number})"

    def _between(self, column: str) -> str:
        if column == "state":
            return "state = 'ok'"
        word = self._chance.choice(["BETWEEN", "NOT BETWEEN"])
        return f"{column} {word} {self._value(column)} AND {self._value(column)}"

    def _pair(self) -> str:
        group = self._chance.choice([_TEXTS, _NUMBERS, _MOMENTS])
        left, right = self._chance.choice(group), self._chance.choice(group)
        return f"{left} {self._chance.choice(_OPERATORS)} {right}"

    def _cast(self) -> str:
        column, kind = self._chance.choice(_CASTS)
        if kind == "int":
            return f"flag::int {self._chance.choice(_OPERATORS)} 1"
        values = [value for value in VALUES[column] if kind != "date" or " " not in str(value)]
        value = literal(str(self._chance.choice(values)))
        spelled = f"CAST({column} AS {kind})" if self._chance.random() < 0.5 else f"{column}::{kind}"
        return f"{spelled} {self._chance.choice(_OPERATORS)} {value}"


def random_row(chance: random.Random) -> dict[str, str | None]:
    return {name: None if chance.random() < 0.15 else chance.choice(values) for name, values in VALUES.items()}
