"""Creating tables while another session creates the same ones."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from headwater.postgres import snapshots, tables
from headwater.postgres.catalog import TableName
from headwater.postgres.connections import Connection, connect
from headwater.postgres.tables import SESSION_EVENTS, EventMapping
from headwater.shapes.catalog import ShapeCatalog
from tests.postgres.databases import database
from tests.waiting import wait_until

EVENTS = EventMapping(TableName("public", "session_events"), SESSION_EVENTS, {})
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%CREATE SCHEMA%'"


@pytest.mark.parametrize(
    ("prepare", "made"),
    [
        (lambda connection: tables.prepare(connection, EVENTS), "dead_letters"),
        (snapshots.prepare, "beginnings"),
        (ShapeCatalog("slot").prepare, "shape_owners"),
    ],
    ids=["events", "snapshots", "shapes"],
)
def test_everything_is_created_if_another_session_creates_the_schema_at_the_same_time(
    prepare: Callable[[Connection], None], made: str
) -> None:
    """Postgres rejects the second one of two CREATE SCHEMA IF NOT EXISTS, with everything that is created with it."""
    failed: list[BaseException] = []

    def run(session: Connection) -> None:
        try:
            prepare(session)
        except BaseException as error:
            failed.append(error)

    with database() as running, connect(running.url) as other, connect(running.url) as session:
        with connect(running.url) as watcher:
            thread = threading.Thread(target=run, args=[session])
            with other.transaction():
                other.execute("CREATE SCHEMA headwater")
                thread.start()
                wait_until(lambda: watcher.execute(WAITING).fetchone() == (1,), what="the second session waits")
        thread.join()
        assert not failed, failed
        assert session.execute("SELECT to_regclass(%s) IS NOT NULL", [f"headwater.{made}"]).fetchone() == (True,)
