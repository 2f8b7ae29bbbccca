"""Tables to streams: first the existing rows, then every committed change once, in commit order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from headwater.pipeline.from_postgres import FromPostgres
from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.postgres_reader import FollowedTable
from headwater.postgres import slots
from headwater.postgres.connections import connect
from tests.pipeline.test_to_postgres import running
from tests.pipeline.waiting import eventually
from tests.postgres.databases import database
from tests.spark.streams import Streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def count_of_copies(url: str, slot: str) -> int:
    with psycopg.connect(url) as look:
        if look.execute("SELECT to_regclass('headwater.snapshots')").fetchone() == (None,):
            return 0
        row = look.execute("SELECT count(*) FROM headwater.snapshots WHERE slot = %s", [slot]).fetchone()
        assert row is not None
        return int(row[0])


def test_several_tables_one_slot_a_schema_change_and_a_stream_for_each_key(
    spark: SparkSession, streams: Streams, postgres_url: str, tmp_path: Path
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as sql:
        sql.execute("CREATE TABLE users (id int PRIMARY KEY, name text); CREATE TABLE docs (id text PRIMARY KEY)")
        job = FromPostgres(
            name="several",
            tables=(FollowedTable("users", "user/{key}", "changes"), FollowedTable("docs", "docs-out", "envelopes")),
            slot="several",
            publication="several",
        )
        around = JobEnvironment(streams.root, str(tmp_path), postgres=postgres_url)
        with running(spark, job, around):
            # Both tables are followed from here on; earlier rows would be part of the first copy.
            eventually(lambda: count_of_copies(postgres_url, "several"), lambda found: found == 2)
            sql.execute("INSERT INTO users VALUES (1, 'a')")
            sql.execute("INSERT INTO docs VALUES ('d1')")
            sql.execute("ALTER TABLE users ADD age int")
            sql.execute("UPDATE users SET age = 30, id = 2")
            eventually(lambda: streams.exists("user/2"), bool)
            eventually(lambda: len(streams.messages("docs-out")), lambda found: found == 1)
        assert [one["headers"]["operation"] for one in streams.messages("user/1")] == ["insert", "delete"]
        assert streams.messages("user/2")[0]["value"] == {"id": 2, "name": "a", "age": 30}
        assert streams.messages("docs-out")[0]["after"] == {"id": "d1"}


def test_postgres_crash_duplicates_and_loses_nothing_and_a_dropped_slot_stops_the_job(
    spark: SparkSession, streams: Streams, tmp_path: Path
) -> None:
    with database() as own:
        with psycopg.connect(own.url, autocommit=True) as sql:
            sql.execute("CREATE TABLE items (id int PRIMARY KEY)")
        job = FromPostgres(name="crashing", tables=(FollowedTable("items", "crash-out", "rows"),))
        around = JobEnvironment(streams.root, str(tmp_path), postgres=own.url)
        with running(spark, job, around) as query:
            for round_ in range(3):
                with psycopg.connect(own.url, autocommit=True) as sql:
                    for n in range(5):
                        sql.execute("INSERT INTO items VALUES (%s)", [round_ * 5 + n])
                eventually(lambda: len(streams.messages("crash-out")), lambda found, r=round_: found > r * 5)  # type: ignore[misc]
                own.kill()
                own.start()
            eventually(lambda: len(streams.messages("crash-out")), lambda found: found >= 15)
            assert [one["id"] for one in streams.messages("crash-out")] == list(range(15))
            assert query.exception() is None
        with connect(own.url) as connection:
            slots.drop(connection, job.slot)
        with running(spark, job, around) as query:
            failure = eventually(query.exception, lambda found: found is not None)
            assert "The slot headwater does not exist" in str(failure)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(own.url, connect_timeout=2).close()
