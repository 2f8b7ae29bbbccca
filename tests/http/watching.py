"""What a server's metrics say, and waiting until they say it: how a test knows that a request has arrived."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import Server
from tests.waiting import wait_until

COUNTED_BODY_BYTES = 1024 * 1024
"""A part of a body that is large enough to be counted while the rest is missing."""


def samples(server: Server) -> dict[str, float]:
    """Every sample by name and labels: `name{a=x,b=y}`."""
    text = httpx.get(f"{server.url}/metrics", verify=False).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def wait_for_sample(server: Server, name: str, value: float) -> None:
    wait_until(lambda: samples(server).get(f"headwater_{name}"), lambda found: found == value, what=name)


def wait_for_live_readers(server: Server, kind: str, count: int) -> None:
    """Until so many requests of the kind, `sse` or `long-poll`, wait for data."""
    wait_for_sample(server, f"live_readers{{kind={kind}}}", count)
