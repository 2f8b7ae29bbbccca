"""Run short Postgres queries from an event loop, on a few threads that each keep a connection.

Invariant: an error is `UnavailableError` exactly if a later retry may succeed; all others are passed to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psycopg

from headwater.postgres.connections import Connection, connect, display_address, is_unavailable
from headwater.shapes.errors import UnavailableError

Result = TypeVar("Result")


class Database:
    def __init__(self, url: str, threads: int, name: str = "shapes") -> None:
        self.url = url
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._local = threading.local()
        self._open: set[Connection] = set()

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Call `work` with a connection, on a thread. It may be called twice, so it must be repeatable."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._call, work)

    def _call(self, work: Callable[[Connection], Result]) -> Result:
        kept: Connection | None = getattr(self._local, "connection", None)
        if kept is not None and not kept.closed:
            try:
                return work(kept)
            except psycopg.Error as error:
                self._discard(kept)
                if not is_unavailable(error) or error.sqlstate is not None:
                    raise self._translated(error) from error
                # The connection broke while it was idle: retry once on a new one.
            except BaseException:
                self._discard(kept)
                raise
        try:
            made = connect(self.url)
        except psycopg.Error as error:
            raise self._translated(error) from error
        self._open.add(made)
        self._local.connection = made
        try:
            return work(made)
        except psycopg.Error as error:
            self._discard(made)
            raise self._translated(error) from error
        except BaseException:
            self._discard(made)
            raise

    def _translated(self, error: psycopg.Error) -> Exception:
        if is_unavailable(error):
            return UnavailableError(
                f"Postgres at {display_address(self.url)} cannot be used: {' '.join(str(error).split())}"
            )
        return error

    def _discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._local.connection = None
        with contextlib.suppress(psycopg.Error):
            connection.close()

    def close(self) -> None:
        """Cancel running queries and stop the threads."""
        for connection in list(self._open):
            with contextlib.suppress(Exception):
                connection.cancel_safe(timeout=1.0)
        self._pool.shutdown(wait=True, cancel_futures=True)
        for connection in list(self._open):
            connection.close()
