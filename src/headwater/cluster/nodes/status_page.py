"""The state of the cluster over HTTP: its tables in Postgres, and the figures of each shard from its process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Final

import msgspec
import psycopg

from headwater.cluster.nodes.schema import connect
from headwater.cluster.nodes.status import ClusterStatus, cluster_status
from headwater.cluster.peers import PeerLostError
from headwater.cluster.prepared_responses import PreparedResponse
from headwater.cluster.relay import Relay
from headwater.config import Settings
from headwater.core.errors import WorkerUnavailable
from headwater.engine.open_storage import Store
from headwater.http import paths
from headwater.http.cluster import render_cluster
from headwater.http.context import Context
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Response
from headwater.http.routing import Route
from headwater.storage.journaled_store import JournaledStorage

KEPT_S: Final = 1.0
"""Viewers share an answer of Postgres for this long."""
POSTGRES_S: Final = 5.0
FIGURES_S: Final = 1.0
"""A process that does not answer within this time has no figures."""
_FIGURES: Final = ("cold_objects", "cold_bytes", "cold_waiting_bytes", "cold_cached_bytes", "cold_fetched_bytes")


class StatusPage:
    def __init__(self, settings: Settings, relay: Relay, store: Store) -> None:
        self._settings = settings
        self._relay = relay
        self._store = store
        self._asking: asyncio.Task[ClusterStatus] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        relay.peers.answers("figures", self._figures_here)

    def routes(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """The routes, with that of the state of the cluster replaced."""

        def handle(_context: Context, request: Request, _address: Address) -> PreparedResponse:
            answers: list[Response] = []

            async def prepare() -> None:
                answers.append(await self._answer())

            return PreparedResponse(prepare, answers.pop, self._start, request)

        return tuple(
            replace(route, handler=handle) if route.pattern == paths.CLUSTER and route.method != "OPTIONS" else route
            for route in routes
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._run(work)

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._relay.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self) -> Response:
        if self._asking is None:
            self._asking = self._run(asyncio.to_thread(self._ask_postgres))
            self._asking.add_done_callback(lambda _: self._relay.loop.call_later(KEPT_S, self._forget))
        try:
            async with asyncio.timeout(POSTGRES_S):
                status = await asyncio.shield(self._asking)
        except (psycopg.Error, TimeoutError) as error:
            reason = str(error).strip() or "it does not answer"
            raise WorkerUnavailable(
                f"The state of the cluster could not be read from Postgres ({reason}). Check Postgres, then retry."
            ) from None
        found = await asyncio.gather(*(self._figures_of(shard.id) for shard in status.shards))
        shards = [
            {**msgspec.to_builtins(shard), "figures": figures}
            for shard, figures in zip(status.shards, found, strict=True)
        ]
        return render_cluster({**msgspec.to_builtins(status), "shards": shards})

    def _forget(self) -> None:
        self._asking = None

    def _ask_postgres(self) -> ClusterStatus:
        cluster = self._settings.cluster
        with connect(cluster.postgres_url, "page") as connection:
            return cluster_status(connection, require_standby=cluster.require_standby)

    async def _figures_of(self, shard: int) -> dict[str, int] | None:
        try:
            async with asyncio.timeout(FIGURES_S):
                figures: dict[str, int] = await self._relay.peers.ask(shard, "figures")
        except (PeerLostError, TimeoutError):
            return None
        return figures

    async def _figures_here(self, sender: int, arguments: Any) -> dict[str, int]:
        storage = self._store.storage
        assert isinstance(storage, JournaledStorage)
        parts, usage = storage.parts(), storage.usage()
        return {"payload_bytes": usage.payload_bytes, **{name: parts[name] for name in _FIGURES}}
