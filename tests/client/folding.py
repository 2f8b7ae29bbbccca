"""The state of streams of `{"key": …, "value": …}`, and its snapshots, for the client's tests."""

from __future__ import annotations

import json
from typing import Any

from headwater.client import Snapshot

SNAPSHOT_TYPE = "application/vnd.test.state+json"


class Table:
    """The last value of every key, and the number of updates."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.applied = 0
        self.restored = 0

    def restore(self, snapshot: Snapshot | None) -> None:
        self.restored += 1
        self.values, self.applied = {}, 0
        if snapshot is not None:
            assert snapshot.content_type == SNAPSHOT_TYPE
            state = json.loads(snapshot.body)
            self.values, self.applied = state["values"], state["applied"]

    def apply(self, update: bytes) -> None:
        event = json.loads(update)
        # Every update contains its number, so that a gap or a repeat is detected.
        assert event["number"] == self.applied, f"update {event['number']} came after {self.applied} others"
        self.applied += 1
        if event["value"] is None:
            self.values.pop(event["key"], None)
        else:
            self.values[event["key"]] = event["value"]

    def snapshot(self) -> bytes:
        return json.dumps({"values": self.values, "applied": self.applied}).encode()
