"""The states of a connection change only by events of the tables."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import headwater
from headwater.http import states
from headwater.http.states import ANSWERED, CLOSE, CLOSED, IDLE, LIVE, READING, RELAYED, SERVING, TAKEN, WRITING

PACKAGE = Path(headwater.__file__).parent
FILES = {"_writing": (WRITING, ("http", "cluster")), "state": (READING, ("http/parser.py",))}


def assignments(attribute: str, places: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
    """Every value that is assigned to this attribute of `self`, except in `__init__`, and where."""
    for place in places:
        for path in sorted((PACKAGE / place).rglob("*.py")) if not place.endswith(".py") else [PACKAGE / place]:
            for function in ast.walk(ast.parse(path.read_text())):
                if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
                    continue
                for node in ast.walk(function):
                    if isinstance(node, ast.Assign) and any(
                        isinstance(target, ast.Attribute) and target.attr == attribute for target in node.targets
                    ):
                        yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.value


def test_every_change_of_state_is_a_transition_of_a_table() -> None:
    fast = {"TAKEN", "ANSWERED", "RELAYED"}
    found, others = 0, []
    for attribute, (table, places) in FILES.items():
        name = "WRITING" if table is WRITING else "READING"
        for where, value in assignments(attribute, places):
            found += 1
            if isinstance(value, ast.Name) and value.id in fast and attribute == "_writing":
                continue
            if not ast.unparse(value).startswith(f"{name}[self.{attribute}]["):
                others.append(f"{where}: {ast.unparse(value)}")
    assert found >= 14, "the assignments were found"
    assert others == [], "use the table, or a transition that `states` looks up once"


def test_transitions_of_repeated_requests_are_the_states_of_the_table() -> None:
    # Connections compare states by identity.
    assert TAKEN is SERVING
    assert ANSWERED is IDLE
    assert RELAYED is LIVE


def test_every_state_of_a_table_can_be_closed_and_leads_to_states_of_the_table() -> None:
    for table in (READING, WRITING):
        for events in table.values():
            assert events[CLOSE] is CLOSED
            assert set(events.values()) <= table.keys()
    assert set(WRITING) <= {value for name, value in vars(states).items() if name.isupper() and isinstance(value, str)}
