"""Streams to tables: each event once, in order, with its offset; invalid events are set aside with a reason."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from headwater.pipeline.job import Job, JobEnvironment
from headwater.pipeline.to_postgres import ToPostgres
from tests.pipeline.waiting import eventually
from tests.postgres.databases import database
from tests.spark.streams import Streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


@contextmanager
def running(spark: SparkSession, job: Job, environment: JobEnvironment) -> Iterator[StreamingQuery]:
    query = _initialized(spark, job, environment)
    try:
        yield query
    finally:
        query.stop()


def _phase(query: StreamingQuery) -> str:
    return str(query.status["message"]) if query.isActive else "ended"


def _initialized(spark: SparkSession, job: Job, environment: JobEnvironment) -> StreamingQuery:
    """Start a job; retry if Spark gives up on its Python process after ten seconds, which happens on a busy machine."""
    while True:
        query = job.start(spark, environment)
        eventually(functools.partial(_phase, query), lambda phase: "Initializing" not in phase)
        error = None if query.isActive else query.exception()
        if error is None or "failed to connect back" not in str(error):
            return query


def rows(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()


def count(url: str, table: str) -> Callable[[], int]:
    return lambda: int(rows(url, f"SELECT count(*) FROM {table}")[0][0])


def test_events_are_loaded_once_in_order_with_offsets_and_reference_columns(
    spark: SparkSession, streams: Streams, postgres_url: str, tmp_path: Path
) -> None:
    around = JobEnvironment(streams.root, str(tmp_path), postgres=postgres_url)
    job = ToPostgres(name="sessions-in-order", streams=("session-order",))
    event = {"key": "user:alice", "type": "presence", "operation": "set", "value": {"status": "online"}}
    with running(spark, job, around):
        tokens = [streams.append("session-order", [event])]
        tokens += [streams.append("session-order", [{"key": n, "type": "message"}]) for n in range(20)]
        eventually(count(postgres_url, "session_events"), lambda found: found >= 21)
    found = rows(
        postgres_url,
        "SELECT stream_name, event_key, event_type, operation, payload, ds_offset FROM session_events ORDER BY id",
    )
    offsets = [token[:33] for token in tokens]
    assert found[0] == ("session-order", "user:alice", "presence", "set", event, offsets[0])
    assert rows(postgres_url, "SELECT DISTINCT ds_incarnation FROM session_events") == [(tokens[0][34:],)]
    assert [row[5] for row in found] == offsets
    assert found[3][1:4] == ("2", "message", None)
    # Load everything again after losing the checkpoint: nothing changes.
    shutil.rmtree(tmp_path / job.name)
    with running(spark, job, around):
        last = streams.append("session-order", [{"key": "last"}])[:33]
        eventually(lambda: rows(postgres_url, "SELECT ds_offset FROM session_events"), lambda seen: (last,) in seen)
    assert [row[0] for row in rows(postgres_url, "SELECT ds_offset FROM session_events ORDER BY id")] == [
        *offsets,
        last,
    ]
    assert rows(postgres_url, "SELECT job, dead FROM headwater.batches")[0] == (job.name, 0)


def test_events_of_a_recreated_stream_are_loaded_without_manual_steps(
    spark: SparkSession, streams: Streams, postgres_url: str, tmp_path: Path
) -> None:
    """Streams can be deleted after they are synced. The new events have the offsets of the old ones."""
    around = JobEnvironment(streams.root, str(tmp_path), postgres=postgres_url)
    job = ToPostgres(name="sessions-again", streams=("session-again",))

    def keys() -> list[str]:
        found = rows(postgres_url, "SELECT event_key FROM session_events ORDER BY id")
        return [row[0] for row in found]

    with running(spark, job, around):
        streams.append("session-again", [{"key": f"a{n}"} for n in range(3)])
        eventually(count(postgres_url, "session_events"), lambda found: found >= 3)
        streams.delete("session-again")
        streams.filled("session-again", [{"key": f"b{n}"} for n in range(3)])
        eventually(count(postgres_url, "session_events"), lambda found: found >= 6)
        assert keys() == ["a0", "a1", "a2", "b0", "b1", "b2"]
    # Recreated again while the job is stopped, and longer than what was read.
    streams.delete("session-again")
    streams.filled("session-again", [{"key": f"c{n}"} for n in range(5)])
    with running(spark, job, around):
        eventually(count(postgres_url, "session_events"), lambda found: found >= 11)
    assert keys() == ["a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2", "c3", "c4"]


def test_invalid_rows_go_to_the_dead_letters_and_block_nothing(
    spark: SparkSession, streams: Streams, postgres_url: str, tmp_path: Path
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE orders (s text, o text, amount int CHECK (amount > 0), note varchar(5), place bigint)"
        )
    job = ToPostgres(
        name="orders-in",
        table="orders",
        streams=("orders-dead", "orders-text"),
        columns={"s": "@stream", "o": "@offset", "amount": "sum.cents", "note": "note", "place": "@position"},
        event_bytes_max=500,
    )
    streams.create("orders-text", "text/plain")
    streams.append_bytes("orders-text", b"\xff\x00 no text", "text/plain")
    good = [{"sum": {"cents": n + 1}, "note": "ok"} for n in range(40)]
    bad: list[Any] = [
        [1, 2],
        "text",
        {"sum": {"cents": "many"}},
        {"sum": {"cents": -1}},
        {"note": "longer than five"},
        {"note": "x\u0000"},
        {"pad": "p" * 600},
    ]
    mixed = [*good[:10], bad[0], bad[1], *good[10:20], bad[2], bad[3], bad[4], *good[20:], bad[5], bad[6]]
    streams.create("orders-dead")
    streams.append("orders-dead", [[one] if isinstance(one, list) else one for one in mixed])
    around = JobEnvironment(streams.root, str(tmp_path), postgres=postgres_url)
    with running(spark, job, around):
        eventually(count(postgres_url, "orders"), lambda found: found >= len(good))
        eventually(count(postgres_url, "headwater.dead_letters"), lambda found: found >= len(bad) + 1)
    assert [row[0] for row in rows(postgres_url, "SELECT amount FROM orders ORDER BY place")] == list(range(1, 41))
    letters = rows(postgres_url, "SELECT reason, left(detail, 5), stream_name FROM headwater.dead_letters ORDER BY id")
    assert sorted(letters) == sorted(
        [
            ("not-an-object", "The e", "orders-dead"),
            ("not-an-object", "The e", "orders-dead"),
            ("refused", "22P02", "orders-dead"),
            ("constraint", "23514", "orders-dead"),
            ("refused", "22001", "orders-dead"),
            ("refused", "22P05", "orders-dead"),
            ("too-big", "The e", "orders-dead"),
            ("not-json", "The s", "orders-text"),
        ]
    )
    assert rows(postgres_url, "SELECT value FROM headwater.dead_letters WHERE reason = 'not-json'") == [
        (b"\xff\x00 no text",)
    ]


def test_job_waits_for_an_unavailable_database_without_loss(
    spark: SparkSession, streams: Streams, tmp_path: Path
) -> None:
    with database() as own:
        around = JobEnvironment(streams.root, str(tmp_path), postgres=own.url)
        with running(spark, ToPostgres(name="while-down", streams=("while-down",)), around) as query:
            streams.append("while-down", [{"n": 0}])
            eventually(count(own.url, "session_events"), lambda found: found == 1)
            own.kill()
            for n in range(1, 6):
                streams.append("while-down", [{"n": n}])
            own.start()
            eventually(count(own.url, "session_events"), lambda found: found >= 6)
            own.stop()
            streams.append("while-down", [{"n": 6}])
            own.start()
            eventually(count(own.url, "session_events"), lambda found: found >= 7)
            assert query.exception() is None
        found = rows(own.url, "SELECT (payload->>'n')::int FROM session_events ORDER BY id")
        assert [row[0] for row in found] == list(range(7))
