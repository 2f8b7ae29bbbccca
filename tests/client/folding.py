"""A state that streams of `{"key": …, "value": …}` fold to, and its snapshots: what the client's tests follow."""

from __future__ import annotations

import json
from typing import Any

from headwater.client import Snapshot

SNAPSHOT_TYPE = "application/vnd.test.state+json"


class Table:
    """The last value of every key, and how many updates made it so."""

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
        # Every update names its own number, so that a gap or a repeat cannot pass.
        assert event["number"] == self.applied, f"update {event['number']} came after {self.applied} others"
        self.applied += 1
        if event["value"] is None:
            self.values.pop(event["key"], None)
        else:
            self.values[event["key"]] = event["value"]

    def snapshot(self) -> bytes:
        return json.dumps({"values": self.values, "applied": self.applied}).encode()
