"""Which requests a worker relays to the standby of a shard: those whose routes say so, whatever metrics call them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.cluster.placements import Placements
from headwater.cluster.relay import Relay, RelayedAnswer
from headwater.cluster.routing import WorkerRouter
from headwater.cluster.shards import ShardMap
from headwater.cluster.standby_relay import StandbyAnswer
from headwater.http import paths
from headwater.http.request import Request
from headwater.http.routes import ROUTES
from headwater.http.routing import Route
from tests.cluster.workers import name_in

WORKERS = 2
TARGET = f"/v1/stream/{name_in(1, WORKERS, 'read-')}"
CONTEXT: Any = SimpleNamespace(limits=SimpleNamespace(max_name_bytes=100), root_aliases=(), metrics=None)


@pytest.fixture
def relay() -> Iterator[Relay]:
    """The relay of worker 0, in a cluster where worker 1 has a standby here."""
    loop = asyncio.new_event_loop()
    peers: Any = SimpleNamespace(worker=0)
    relay = Relay(peers, loop, 1.0)
    relay.standbys = cast("Any", SimpleNamespace(get={1: object()}.get, on_connected=[]))
    yield relay
    loop.close()


def answer_of(relay: Relay, routes: tuple[Route, ...], method: str, query: str) -> object:
    placements = cast("Placements", SimpleNamespace(by_name={}, on_placed=None))
    router = WorkerRouter(routes, ShardMap(16, WORKERS), 0, relay, placements, cast("Any", None))
    request = Request(method.encode(), f"{TARGET}{query}".encode(), {b"host": b"a"}, b"", False, True)
    route, address = router.resolve(CONTEXT, request)
    return route.handler(CONTEXT, request, address)


def test_a_standby_may_answer_reads_of_streams_only() -> None:
    assert {(route.method, route.pattern, route.live) for route in ROUTES if route.standby_may_answer} == {
        ("GET", paths.STREAM, ""),
        ("GET", paths.STREAM, "long-poll"),
        ("GET", paths.STREAM, "sse"),
        ("HEAD", paths.STREAM, ""),
    }


@pytest.mark.parametrize(
    ("method", "query", "expected"),
    [
        ("GET", "", StandbyAnswer),
        ("HEAD", "", StandbyAnswer),
        ("POST", "", RelayedAnswer),
        ("DELETE", "", RelayedAnswer),
        ("GET", "?lease=show", RelayedAnswer),
    ],
)
def test_reads_are_relayed_to_the_standby_and_other_requests_to_the_owner(
    relay: Relay, method: str, query: str, expected: type
) -> None:
    assert type(answer_of(relay, ROUTES, method, query)) is expected


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_names_in_metrics_do_not_decide_where_a_request_is_relayed(relay: Relay, method: str) -> None:
    renamed = tuple(replace(route, operation=f"renamed-{route.operation}") for route in ROUTES)
    assert type(answer_of(relay, renamed, method, "")) is StandbyAnswer
    assert type(answer_of(relay, renamed, "DELETE", "")) is RelayedAnswer
