"""Streams to a table across upgrades, deletions and restarts: each event is one row, and none is missed.

The source and the loading of the job `to_postgres` are run as Spark runs them, without a session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import httpx
import pyarrow as pa
import pytest

from headwater.pipeline.loading import BatchPart, load, statements
from headwater.pipeline.to_postgres import ToPostgres
from headwater.postgres import tables
from headwater.postgres.catalog import table_name
from headwater.postgres.connections import Connection, connect
from headwater.postgres.tables import SESSION_EVENTS, EventMapping
from tests.ports import free_port
from tests.serving import serve
from tests.spark.driving import Query, stop_all, without_incarnation
from tests.spark.streams import Streams

MAPPED = EventMapping(table_name("session_events"), SESSION_EVENTS, {})
ON_GONE = ToPostgres(streams=("s",)).on_gone


@pytest.fixture
def connection(postgres_url: str) -> Iterator[Connection]:
    with connect(postgres_url) as session:
        yield session
    stop_all()


class Sync:
    """A job with its checkpoint and its table."""

    def __init__(self, at: Streams, connection: Connection, /, **options: str) -> None:
        self._connection = connection
        self.query = Query(at, **{"valueType": "binary", "onGone": ON_GONE, "retryTimeout": "20", **options})
        tables.prepare(connection, MAPPED)

    def load(self) -> None:
        """Load the planned batch. Without a `commit` after it, the driver seems to have died."""
        found = self.query.tables()
        if found:
            how = statements(self._connection, MAPPED)
            load(self._connection, how, BatchPart("job", "q", 0, 0), pa.Table.from_batches(found), 1 << 20)

    def commit(self) -> None:
        self.query.place = self.query.planned

    def run(self, rows: int) -> None:
        """Run batches until the table has this many rows."""
        deadline = time.monotonic() + 60
        while len(self.keys()) < rows:
            assert time.monotonic() < deadline, self.keys()
            self.query.plan()
            self.load()
            self.commit()

    def keys(self) -> list[str]:
        found = self._connection.execute("SELECT event_key FROM session_events ORDER BY id").fetchall()
        return [row[0] for row in found]


def events(letter: str, count: int) -> list[dict[str, str]]:
    return [{"key": f"{letter}{n}"} for n in range(1, count + 1)]


def keys(letter: str, count: int) -> list[str]:
    return [event["key"] for event in events(letter, count)]


def test_the_job_waits_for_deleted_streams_and_reads_new_ones_by_default() -> None:
    assert ON_GONE == "restart"


def test_upgrade_in_the_middle_of_a_batch_loads_each_event_once(
    streams: Streams, stream_name: Callable[[], str], connection: Connection
) -> None:
    name = streams.filled(stream_name(), events("a", 3))
    sync = Sync(streams, connection, streams=name)
    # The previous release planned and loaded the batch, and was stopped before it recorded that in the checkpoint.
    sync.query.plan()
    sync.query.place = without_incarnation(sync.query.place)
    sync.query.planned = without_incarnation(sync.query.planned)
    sync.load()
    assert connection.execute("SELECT DISTINCT ds_incarnation FROM session_events").fetchall() == [("",)]
    sync.query.restart()
    sync.load()
    sync.commit()
    streams.append(name, [{"key": "a4"}])
    sync.run(4)
    # The checkpoint is lost, and everything is loaded again.
    sync.query.place = None
    sync.query.restart()
    streams.append(name, [{"key": "a5"}])
    sync.run(5)
    assert sync.keys() == keys("a", 5)


@pytest.mark.parametrize("on_gone", ["restart", "skip", "bootstrap"])
def test_all_events_of_a_recreated_stream_are_loaded(
    streams: Streams, stream_name: Callable[[], str], connection: Connection, on_gone: str
) -> None:
    name = streams.filled(stream_name(), events("a", 100))
    sync = Sync(streams, connection, streams=name, onGone=on_gone)
    sync.run(100)
    streams.delete(name)
    streams.filled(name, events("b", 60))
    sync.run(160)
    assert sync.keys() == keys("a", 100) + keys("b", 60)


@pytest.mark.parametrize("running", [True, False], ids=["running", "restarted"])
@pytest.mark.parametrize("letter", ["b", "a"], ids=["other events", "equal events"])
def test_all_events_of_a_recreated_stream_with_equal_sizes_are_loaded(
    streams: Streams, stream_name: Callable[[], str], connection: Connection, running: bool, letter: str
) -> None:
    name = streams.filled(stream_name(), events("a", 3))
    sync = Sync(streams, connection, streams=name)
    sync.run(3)
    streams.delete(name)
    streams.filled(name, events(letter, 3))
    if not running:
        sync.query.restart()
    sync.run(6)
    assert sync.keys() == keys("a", 3) + keys(letter, 3)
    # A new checkpoint loads nothing twice.
    sync.query.place = None
    sync.query.restart()
    streams.append(name, [{"key": "last"}])
    sync.run(7)
    assert sync.keys() == [*keys("a", 3), *keys(letter, 3), "last"]


def test_rows_of_an_earlier_release_are_kept_with_those_of_a_recreated_stream(
    streams: Streams, stream_name: Callable[[], str], connection: Connection
) -> None:
    name = streams.filled(stream_name(), events("a", 3))
    sync = Sync(streams, connection, streams=name)
    sync.run(3)
    connection.execute("UPDATE session_events SET ds_incarnation = ''")
    connection.execute("DELETE FROM headwater.earlier_rows")
    sync.query.place = without_incarnation(sync.query.place)
    streams.delete(name)
    streams.filled(name, events("b", 2))
    # Shorter than what was read: the only sign of a recreation if the offset has no incarnation.
    sync.query.restart()
    sync.run(5)
    assert sync.keys() == keys("a", 3) + keys("b", 2)


def test_all_events_after_a_kill_of_a_memory_mode_server_are_loaded(connection: Connection) -> None:
    port = free_port()
    with serve(port=port, DS_STORAGE__MODE="memory") as server, httpx.Client() as http:
        sync = Sync(Streams(f"{server.url}/v1/stream", http), connection, streams="events")
        Streams(f"{server.url}/v1/stream", http).filled("events", events("a", 3))
        sync.run(3)
        server.kill()
    with serve(port=port, DS_STORAGE__MODE="memory") as server, httpx.Client() as http:
        Streams(f"{server.url}/v1/stream", http).filled("events", events("b", 4))
        sync.run(7)
    assert sync.keys() == keys("a", 3) + keys("b", 4)
