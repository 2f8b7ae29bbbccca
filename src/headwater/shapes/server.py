"""The process of `headwater shapes`: create its parts and serve until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn
import uvloop

from headwater.shapes.api import Api, Times
from headwater.shapes.asgi import Access, App
from headwater.shapes.catalog import ShapeCatalog
from headwater.shapes.database import Database
from headwater.shapes.errors import UnavailableError
from headwater.shapes.follower import SlotFollower
from headwater.shapes.registry import Limits, Registry
from headwater.shapes.streams import Streams

log = logging.getLogger("headwater.shapes")

_DATABASE_THREADS: Final = 8
_SNAPSHOTS_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration of the process."""

    postgres_url: str
    server_url: str
    server_token: str
    server_ca_file: Path | None
    host: str
    port: int
    slot: str
    publication: str
    limits: Limits
    times: Times
    access: Access
    subset_bytes_max: int
    maintenance_s: float
    connections_max: int


def run(configuration: Configuration) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(configuration))


class _Server(uvicorn.Server):
    """A server that logs its address, with the port that the system chose, and does not handle signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for one in server.sockets:
                host, port = one.getsockname()[:2]
                log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)


async def _serve(configuration: Configuration) -> None:
    database = Database(configuration.postgres_url, _DATABASE_THREADS, "shapes")
    snapshots = Database(configuration.postgres_url, _SNAPSHOTS_AT_ONCE, "snapshots")
    streams = Streams(configuration.server_url, configuration.server_token, configuration.server_ca_file)
    catalog = ShapeCatalog(configuration.slot)
    registry = Registry(database, snapshots, streams, catalog, configuration.publication, configuration.limits)
    follower = SlotFollower(database, registry, catalog, configuration.slot, configuration.publication)
    api = Api(registry, follower, database, configuration.times, subset_bytes_max=configuration.subset_bytes_max)
    server = _Server(
        uvicorn.Config(
            App(api, configuration.access),
            host=configuration.host,
            port=configuration.port,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=configuration.connections_max,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
    )

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    following = asyncio.create_task(follower.run())
    maintaining = asyncio.create_task(_maintain(registry, configuration.maintenance_s))
    serving = asyncio.create_task(server.serve())
    try:
        done, _ = await asyncio.wait((following, maintaining, serving), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        server.should_exit = True
        for task in (following, maintaining):
            task.cancel()
        await asyncio.gather(following, maintaining, serving, return_exceptions=True)
        await registry.close()
        await streams.close()
        database.close()
        snapshots.close()


async def _maintain(registry: Registry, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        with contextlib.suppress(UnavailableError):
            await registry.maintain()
