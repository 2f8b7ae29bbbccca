"""`headwater ls` folds a registry that other programs may have written to."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.cli.listing import _fold

EVENT = {"type": "stream", "key": "a", "headers": {"operation": "insert"}, "value": {"contentType": "text/plain"}}


@pytest.mark.parametrize(
    "strange",
    [
        {"headers": None},
        {"type": "stream", "key": "b", "headers": None},
        {"type": "stream", "key": "b", "headers": []},
        {"type": "stream", "key": "b", "headers": {}, "value": 5},
        {"type": "stream", "key": 5, "headers": {}},
        {"type": "stream"},
        None,
        [],
        "text",
    ],
)
def test_message_that_is_not_an_event_is_ignored(strange: Any) -> None:
    found: dict[str, dict[str, Any]] = {}
    _fold(found, EVENT)
    _fold(found, strange)
    assert list(found) == ["a"]


def test_event_with_values_of_other_types_is_listed_without_them() -> None:
    found: dict[str, dict[str, Any]] = {}
    _fold(found, {**EVENT, "value": {"contentType": ["x"], "createdAt": "yesterday"}})
    assert found == {"a": {"name": "a", "content_type": "", "created_at_ms": None}}
