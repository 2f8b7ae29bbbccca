"""The state of a cluster, as a node answers it."""

from __future__ import annotations

from typing import Any

FIGURES = {
    "payload_bytes": 12_000,
    "cold_objects": 3,
    "cold_bytes": 9_500,
    "cold_waiting_bytes": 0,
    "cold_cached_bytes": 4_000,
    "cold_fetched_bytes": 0,
}
STATE: dict[str, Any] = {
    "id": "6f",
    "name": "headwater",
    "nodes": [
        {
            "name": "node-0",
            "address": "10.0.0.1:4437",
            "shards": 2,
            "leaves": False,
            "warm": [],
            "clock_ahead_s": 0.002,
            "silent_s": 0.2,
            "responds": True,
        },
        {
            "name": "node-1",
            "address": "10.0.0.2:4437",
            "shards": 0,
            "leaves": True,
            "warm": [1],
            "clock_ahead_s": -3.5,
            "silent_s": 0.1,
            "responds": True,
        },
    ],
    "shards": [
        {
            "id": number,
            "owner": "node-0",
            "epoch": 4 + number,
            "seq": 1_234,
            "is_serving": True,
            "journal_batches": 2,
            "journal_bytes": 2_500,
            "figures": FIGURES,
        }
        for number in range(2)
    ],
    "problem": None,
}
