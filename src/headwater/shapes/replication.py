"""Receive changes from Postgres over one replication connection on an event loop.

psycopg has no replication API, but its libpq wrapper is sufficient for COPY BOTH. Invariant: the slot advances only to
positions passed to `acknowledge`, and a batch holds whole transactions in commit order.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headwater.postgres.connections import connect
from headwater.postgres.pgoutput import Decoder, Transaction
from headwater.shapes.errors import UnavailableError

STATUS_INTERVAL_S: Final = 5.0
BATCH_BYTES: Final = 1 << 20
_EPOCH_US: Final = 946_684_800_000_000
_DATA: Final = ord("w")
_KEEP_ALIVE: Final = ord("k")
_u64: Final = struct.Struct("!Q").unpack_from


@dataclass(slots=True)
class ChangeBatch:
    """Transactions that were received together, and the position up to which the WAL was decoded."""

    transactions: list[Transaction] = field(default_factory=list)
    end_lsn: int = 0


class Replication:
    """One session. Call `open` on a thread, everything else on the loop."""

    def __init__(self, url: str, slot: str, publication: str) -> None:
        self._decoder = Decoder(as_text=True)
        self._acknowledged = 0
        self._reported_at = 0.0
        given = conninfo_to_dict(url)
        self._connection = connect(make_conninfo(url, replication="database", **_without_options(given)))
        self._pg = self._connection.pgconn
        start = sql.SQL("START_REPLICATION SLOT {} LOGICAL 0/0 (proto_version '1', publication_names {})").format(
            sql.Identifier(slot), sql.Literal(f'"{publication}"')
        )
        try:
            self._pg.send_query(start.as_bytes(self._connection))
            result = self._pg.get_result()
            if result is None or result.status != pq.ExecStatus.COPY_BOTH:
                message = result.error_message.decode("utf-8", "replace").strip() if result is not None else ""
                raise UnavailableError(f"Replication did not start: {message}")
            self._pg.nonblocking = 1
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.close()

    async def receive(self) -> ChangeBatch:
        """Receive what Postgres has sent; wait until there is something to apply or to acknowledge."""
        batch = ChangeBatch()
        size = 0
        while True:
            count, data = self._pg.get_copy_data(1)
            if count > 0:
                size += count
                self._take(bytes(data), batch)
                if size >= BATCH_BYTES:
                    if batch.transactions:
                        return batch
                    # A large transaction: let other tasks run while it is received.
                    size = 0
                    await asyncio.sleep(0)
            elif count < 0:
                result = self._pg.get_result()
                message = result.error_message.decode("utf-8", "replace").strip() if result is not None else "ended"
                raise UnavailableError(f"Replication stopped: {message}")
            elif batch.transactions or batch.end_lsn > self._acknowledged:
                return batch
            else:
                await self._readable()
                try:
                    self._pg.consume_input()
                except psycopg.OperationalError as error:
                    raise UnavailableError(f"Replication stopped: {' '.join(str(error).split())}") from None

    def _take(self, data: bytes, batch: ChangeBatch) -> None:
        if data[0] == _DATA:
            done = self._decoder.feed(data[25:])
            if done is not None:
                batch.end_lsn = max(batch.end_lsn, done.end_lsn)
                if done.changes:
                    batch.transactions.append(done)
        elif data[0] == _KEEP_ALIVE:
            if not self._decoder.is_within_transaction:
                # Everything before this position was sent, so WAL without published changes advances the slot too.
                batch.end_lsn = max(batch.end_lsn, _u64(data, 1)[0])
            if data[17]:
                self._report()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        descriptor = self._pg.socket
        loop.add_reader(descriptor, _resolver(ready))
        try:
            await asyncio.wait((ready,), timeout=STATUS_INTERVAL_S)
        finally:
            loop.remove_reader(descriptor)
        if time.monotonic() - self._reported_at > STATUS_INTERVAL_S:
            self._report()

    def acknowledge(self, lsn: int) -> None:
        """Confirm that everything up to this position is durable."""
        if lsn > self._acknowledged:
            self._acknowledged = lsn
            self._report()

    def _report(self) -> None:
        now = time.time_ns() // 1000 - _EPOCH_US
        place = self._acknowledged
        try:
            self._pg.put_copy_data(struct.pack("!cQQQqB", b"r", place, place, place, now, 0))
            self._pg.flush()
        except psycopg.OperationalError as error:
            raise UnavailableError(f"Replication stopped: {' '.join(str(error).split())}") from None
        self._reported_at = time.monotonic()


def _resolver(future: asyncio.Future[None]) -> Callable[[], None]:
    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    return resolve


def _without_options(given: dict[str, Any]) -> dict[str, Any]:
    """Add an application name, unless the address has one."""
    return {} if given.get("application_name") else {"application_name": "headwater shapes"}
