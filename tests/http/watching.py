"""Read a server's metrics, and wait for a value: this is how a test knows that a request was received."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import Server
from tests.waiting import wait_until

COUNTED_BODY_BYTES = 1024 * 1024
"""Part of a body, large enough to be counted before the rest is received."""


def samples(server: Server) -> dict[str, float]:
    """Return every sample by name and labels: `name{a=x,b=y}`."""
    text = httpx.get(f"{server.url}/metrics", verify=False).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def wait_for_sample(server: Server, name: str, value: float) -> None:
    wait_until(lambda: samples(server).get(f"headwater_{name}"), lambda found: found == value, what=name)


def wait_for_body(server: Server) -> None:
    """Wait until a body of `COUNTED_BODY_BYTES` or more is being received. Memory is reserved ahead of its bytes."""
    wait_until(
        lambda: samples(server).get("headwater_request_body_bytes", 0.0),
        lambda held: held >= COUNTED_BODY_BYTES,
        what="a request body in memory",
    )


def wait_for_live_readers(server: Server, kind: str, count: int) -> None:
    """Wait until this many requests of a kind, `sse` or `long-poll`, wait for data."""
    wait_for_sample(server, f"live_readers{{kind={kind}}}", count)
