"""Connections to Postgres, what its errors mean, and waiting for one that is away.

Invariant: an error is exactly one of three: the database is away or short of something (wait, and nothing is lost), a
row is not acceptable (only that row is set aside), or the set-up is wrong (stop and say so).
"""

from __future__ import annotations

import logging
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

# By class or by code of SQLSTATE: connection exceptions, serialization and deadlock, out of resources (a full disk
# among them), shut down or not yet up, read-only (a standby that is about to be promoted), a slot in use.
_AWAY: Final = ("08", "40", "53", "57", "58", "25006", "55006", "55P03")
# Data, constraints, limits of a value or row, a trigger's refusal, and a generated or restricted column.
_ROW: Final = ("21", "22", "23", "27", "38", "39", "44", "54", "P0001", "P0004", "428C9")


class PostgresAway(Exception):
    """No usable database for as long as was allowed."""


class SetUpWrong(Exception):
    """Something that waiting does not cure; the message says what to do."""


def is_away(error: psycopg.Error) -> bool:
    """Whether trying again later may help."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_AWAY)


def is_about_a_row(error: psycopg.Error) -> bool:
    """Whether the fault is with a value or row, so that the others can go on."""
    return error.sqlstate is not None and error.sqlstate.startswith(_ROW)


def connect(url: str, *, autocommit: bool = True) -> Connection:
    """A session that spells values as `values` expects them."""
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


def named(url: str) -> str:
    """The address without its secret, for logs and pages."""
    parts = conninfo_to_dict(url)
    host, port = parts.get("host") or "localhost", parts.get("port") or 5432
    return f"{host}:{port}/{parts.get('dbname') or ''}"


class Waiting:
    """Keeps one connection, and tries again, with back-off, while the database is away."""

    def __init__(self, url: str, wait_max_s: float) -> None:
        self._url = url
        self._wait_max_s = wait_max_s
        self._connection: Connection | None = None

    def run(self, work: Callable[[Connection], Result]) -> Result:
        """`work` may be called several times, each on a connection with nothing open; it must bear that."""
        deadline = time.monotonic() + self._wait_max_s
        back_off_s = _BACK_OFF_FIRST_S
        while True:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = connect(self._url)
                return work(self._connection)
            except psycopg.Error as error:
                self.close()
                if not is_away(error):
                    raise
                trouble = " ".join(str(error).split())
                if time.monotonic() + back_off_s > deadline:
                    raise PostgresAway(
                        f"Postgres at {named(self._url)} could not be used for {self._wait_max_s:.0f} s; the last"
                        f" trouble was: {trouble}"
                    ) from None
                log.warning("Postgres at %s: %s; trying again in %.1f s", named(self._url), trouble, back_off_s)
            except BaseException:
                self.close()
                raise
            time.sleep(back_off_s * random.uniform(0.5, 1.0))
            back_off_s = min(back_off_s * 2, _BACK_OFF_MAX_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
