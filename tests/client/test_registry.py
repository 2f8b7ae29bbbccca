"""Listing the registry, a stream to which other programs may have written."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.client import StreamEntry
from headwater.client.listing import apply_registry_event

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
    found: dict[str, StreamEntry] = {}
    apply_registry_event(found, EVENT)
    apply_registry_event(found, strange)
    assert list(found) == ["a"]


def test_event_with_values_of_other_types_is_listed_without_them() -> None:
    found: dict[str, StreamEntry] = {}
    apply_registry_event(found, {**EVENT, "value": {"contentType": ["x"], "createdAt": "yesterday"}})
    assert found == {"a": StreamEntry("a")}
