"""Connections to Postgres, the classes of its errors, and retries while it is unavailable.

Invariant: an error is of exactly one of three kinds: the database is unavailable or out of a resource (retry; nothing
is lost), a row is invalid (set aside only that row), or the setup is wrong (stop, with the reason).
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from headwater.postgres.values import SESSION_SETTINGS

log = logging.getLogger("headwater.postgres")

Connection = psycopg.Connection[tuple[Any, ...]]
Result = TypeVar("Result")

CONNECT_TIMEOUT_S: Final = 10
_BACK_OFF_FIRST_S: Final = 0.1
_BACK_OFF_MAX_S: Final = 5.0

# SQLSTATE classes and codes: connection exceptions, serialization and deadlock, out of resources (such as a full disk),
# shut down or starting, read-only (a standby that is about to be promoted), a slot in use.
_UNAVAILABLE: Final = ("08", "40", "53", "57", "58", "25006", "55006", "55P03")
# Data, constraints, limits of a value or row, a trigger's refusal, and a generated or restricted column.
_ROW: Final = ("21", "22", "23", "27", "38", "39", "44", "54", "P0001", "P0004", "428C9")


class PostgresUnavailableError(Exception):
    """The database could not be used for the time allowed."""


class PostgresSetupError(Exception):
    """The setup is wrong, so retries cannot help; the message says what to do."""


def is_unavailable(error: psycopg.Error) -> bool:
    """Whether a retry may succeed."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_UNAVAILABLE)


def is_row_error(error: psycopg.Error) -> bool:
    """Whether the error is about one value or row, so that the other rows can be written."""
    return error.sqlstate is not None and error.sqlstate.startswith(_ROW)


def connect(url: str, *, autocommit: bool = True) -> Connection:
    """Connect with the session settings that `values` needs."""
    options = " ".join(f"-c {name}={value}" for name, value in SESSION_SETTINGS.items())
    given = conninfo_to_dict(url)
    before = str(given.get("options") or "")
    return psycopg.connect(
        url,
        autocommit=autocommit,
        connect_timeout=int(given.get("connect_timeout") or CONNECT_TIMEOUT_S),
        options=f"{before} {options}".strip(),
        application_name=str(given.get("application_name") or "headwater"),
    )


def display_address(url: str) -> str:
    """The address without its password, for logs and pages."""
    parts = conninfo_to_dict(url)
    host, port = parts.get("host") or "localhost", parts.get("port") or 5432
    return f"{host}:{port}/{parts.get('dbname') or ''}"


class RetryingConnection:
    """One connection that is reopened, with back-off, while the database is unavailable."""

    def __init__(self, url: str, wait_max_s: float) -> None:
        self._url = url
        self._wait_max_s = wait_max_s
        self._connection: Connection | None = None
        self._process_id = os.getpid()

    def __del__(self) -> None:
        # Spark keeps the function of a query, and with it this object, for some time after the query has ended.
        if self._process_id == os.getpid():
            self.close()

    def run(self, work: Callable[[Connection], Result]) -> Result:
        """Call `work`; if the database became unavailable, again on a new connection. `work` must be repeatable."""
        deadline = time.monotonic() + self._wait_max_s
        back_off_s = _BACK_OFF_FIRST_S
        while True:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = connect(self._url)
                return work(self._connection)
            except psycopg.Error as error:
                self.close()
                if not is_unavailable(error):
                    raise
                reason = " ".join(str(error).split())
                if time.monotonic() + back_off_s > deadline:
                    raise PostgresUnavailableError(
                        f"Postgres at {display_address(self._url)} could not be used for {self._wait_max_s:.0f} s;"
                        f" the last error was: {reason}"
                    ) from None
                log.warning("Postgres at %s: %s; retrying in %.1f s", display_address(self._url), reason, back_off_s)
            except BaseException:
                self.close()
                raise
            time.sleep(back_off_s * random.uniform(0.5, 1.0))
            back_off_s = min(back_off_s * 2, _BACK_OFF_MAX_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
