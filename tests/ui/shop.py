"""A server with the data of a small shop, for tests of the appearance and for the images of the docs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.serving import Server, serve
from tests.ui.pages import BYTES, TEXT, post, put


@contextmanager
def open_shop(*, with_pipeline: bool = True) -> Iterator[Server]:
    """`with_pipeline` adds states of a query and a slot that do not run."""
    with serve(DS_REGISTRY__ENABLED="true") as server, httpx.Client(base_url=server.url) as http:
        chance = random.Random(1)
        put(http, "orders/2026")
        for start in range(0, 200, 50):
            post(http, "orders/2026", [order(chance, number) for number in range(start, start + 50)])
        put(http, "session-events")
        post(http, "session-events", chat())
        put(http, "logs/web-1", TEXT | {"Stream-TTL": "3600"})
        for number in range(20):
            post(http, "logs/web-1", f"10.0.0.{number} GET /index.html 200 {number * 37} ms\n", TEXT)
        put(http, "images/logo", BYTES)
        post(http, "images/logo", bytes(range(256)), BYTES)
        put(http, "archive/2025", {"Content-Type": "application/json", "Stream-Closed": "true"}, '[{"orders":48211}]')
        for number in range(24):
            put(http, f"sensors/room-{number:02}/temperature")
        put(http, "wake/pool")
        http.put(
            "/v1/stream/__ds/subscriptions/billing",
            json={"type": "pull-wake", "pattern": "orders/**", "wake_stream": "wake/pool", "description": "invoices"},
        )
        post(http, "orders/2026", [order(chance, number) for number in range(200, 207)])
        if with_pipeline:
            pipeline(http, chance)
        yield server


def order(chance: random.Random, number: int) -> dict[str, object]:
    items = [{"sku": f"A-{chance.randint(100, 999)}", "qty": chance.randint(1, 5)} for _ in range(chance.randint(1, 3))]
    customer = chance.choice(["Ada", "Grace", "Edsger", "Barbara"])
    return {"order": number, "customer": customer, "total": round(chance.random() * 500, 2), "items": items}


def chat() -> list[dict[str, object]]:
    events: list[dict[str, object]] = [
        {"type": "presence", "key": f"user:{name}", "operation": "set", "value": {"status": "online", "device": device}}
        for name, device in (("alice", "web"), ("bob", "phone"), ("carol", "web"))
    ]
    question = {"from": "alice", "text": "What is a durable stream?"}
    events.append({"type": "message", "key": "msg:1", "operation": "set", "value": question})
    for text in ("A durable stream ", "is an append-only log ", "behind a URL."):
        value = {"from": "assistant", "text": text}
        events.append({"type": "chunk", "key": "msg:2", "operation": "append", "value": value})
    return events


def pipeline(http: httpx.Client, chance: random.Random) -> None:
    put(http, "__pipeline__")
    for batch in range(60):
        now = time.time_ns() // 1_000_000
        value = {
            "status": "running",
            "source": "orders/**",
            "target": "postgres: orders",
            "batch": batch,
            "batch_ms": 60 + chance.randint(0, 40),
            "input_rows_per_s": 400 + 250 * chance.random() * (batch % 7),
            "lag_messages": chance.randint(0, 4),
            "offsets": {"orders/2026": "00000000000000cf_0000000000006f12"},
            "updated_at_ms": now,
        }
        slot = {"database": "shop", "status": "running", "lag_bytes": 18_211, "confirmed_lsn": "0/1A2B3C8"}
        headers = {"operation": "upsert"}
        post(
            http,
            "__pipeline__",
            [
                {"type": "query", "key": "orders-to-postgres", "value": value, "headers": headers},
                {
                    "type": "slot",
                    "key": "headwater_items",
                    "value": slot | {"updated_at_ms": now},
                    "headers": headers,
                },
            ],
        )
