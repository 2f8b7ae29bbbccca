"""Follow the replication slot: connect to Postgres, acquire the slot, apply changes, and reconnect after an outage.

Holding the slot makes this process the only writer of the shapes. Invariant: `is_connected` is true exactly while
changes are received and applied.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

import psycopg
from psycopg import sql

from headwater.postgres import slots
from headwater.postgres.connections import Connection, PostgresSetupError
from headwater.shapes.catalog import ShapeCatalog
from headwater.shapes.database import Database
from headwater.shapes.errors import UnavailableError
from headwater.shapes.registry import Registry
from headwater.shapes.replication import Replication

log = logging.getLogger("headwater.shapes")

_RETRY_FIRST_S: Final = 0.1
_RETRY_MAX_S: Final = 2.0


class SlotFollower:
    def __init__(
        self, database: Database, registry: Registry, catalog: ShapeCatalog, slot: str, publication: str
    ) -> None:
        self._database = database
        self._registry = registry
        self._catalog = catalog
        self._slot = slot
        self._publication = publication
        self._owner = secrets.token_hex(8)
        self._is_loaded = False
        self._connected = asyncio.Event()
        self.problem = "starting"
        """Why it is not connected."""

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    async def wait_until_connected(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Follow until cancelled."""
        wait_s = _RETRY_FIRST_S
        while True:
            try:
                await self._follow()
            except (UnavailableError, PostgresSetupError, psycopg.Error) as error:
                if self._connected.is_set():
                    wait_s = _RETRY_FIRST_S
                self.problem = " ".join(str(error).split())
                log.warning("not connected to Postgres: %s; retrying in %.1f s", self.problem, wait_s)
            finally:
                self._connected.clear()
            await asyncio.sleep(wait_s)
            wait_s = min(_RETRY_MAX_S, wait_s * 2)

    async def _follow(self) -> None:
        is_new = await self._database.run(self._prepare)
        replication = await asyncio.to_thread(Replication, self._database.url, self._slot, self._publication)
        try:
            is_same = await self._database.run(lambda connection: self._catalog.take_over(connection, self._owner))
            if is_new or not is_same or not self._is_loaded:
                await self._registry.load()
                self._is_loaded = True
            self.problem = ""
            self._connected.set()
            log.info("following changes with slot %s", self._slot)
            while True:
                batch = await replication.receive()
                await self._registry.apply(batch)
                replication.acknowledge(batch.end_lsn)
        finally:
            replication.close()

    def _prepare(self, connection: Connection) -> bool:
        """Create the publication, the slot and the catalog if needed; return whether the slot is new."""
        self._catalog.prepare(connection)
        found = connection.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", [self._publication]).fetchone()
        if found is None:
            connection.execute(sql.SQL("CREATE PUBLICATION {}").format(sql.Identifier(self._publication)))
        slot = slots.state(connection, self._slot)
        if slot is not None and slot.is_lost:
            log.warning("slot %s is lost: Postgres removed WAL that was not read yet; creating a new slot", self._slot)
            slots.drop(connection, self._slot)
            slot = None
        if slot is None:
            # Changes were missed, so no existing log can be continued. Record that first, in case of a crash.
            self._catalog.drop_all(connection)
            slots.create(connection, self._slot)
            return True
        return False
