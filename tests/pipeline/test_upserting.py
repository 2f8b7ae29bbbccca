"""Changes to typed tables: the table has the current row of each key, even if changes are repeated or invalid."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pydantic import ValidationError

from headwater.pipeline.from_postgres import FromPostgres
from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.loading import BatchPart, LoadResult
from headwater.pipeline.postgres_reader import FollowedTable
from headwater.pipeline.supervisor import JobSupervisor
from headwater.pipeline.to_postgres import ToPostgres
from headwater.pipeline.upserting import upsert
from headwater.postgres import upserts
from headwater.postgres.catalog import table_name
from headwater.postgres.connections import Connection, PostgresSetupError, connect
from headwater.postgres.upserts import UpsertMapping, UpsertStatements
from tests.pipeline.buckets import Bucket
from tests.pipeline.test_loading import batch
from tests.pipeline.test_to_postgres import rows
from tests.pipeline.waiting import eventually
from tests.spark.streams import Streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

USERS = UpsertMapping(
    table_name("users"),
    {"id": "value.id", "name": "value.name", "tags": "value.tags", "about": "value.about"},
    {"id": "int", "tags": "text[]"},
    ("id",),
)


@pytest.fixture
def connection(postgres_url: str) -> Iterator[Connection]:
    with connect(postgres_url) as session:
        yield session


def change(operation: str, key: int, value: Any = None, **headers: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"type": "users", "key": str(key), "headers": {"operation": operation} | headers}
    return message if value is None else message | {"value": value}


def apply(
    connection: Connection, how: UpsertStatements, messages: list[Any], first: int = 0, **given: Any
) -> LoadResult:
    values = [json.dumps(message).encode() for message in messages]
    return upsert(connection, how, BatchPart("job", "q", 0, 0), batch(values, first=first, **given), 10_000)


def held(connection: Connection) -> dict[int, Any]:
    found = connection.execute("SELECT id, name, about FROM users").fetchall()
    return {row[0]: row[1] if row[2] is None else row[1:] for row in found}


def test_last_change_of_each_key_wins_and_a_repeat_changes_nothing(connection: Connection) -> None:
    how = upserts.prepare(connection, USERS)
    messages = [
        change("insert", 1, {"id": 1, "name": "a", "tags": ["x"]}),
        change("insert", 2, {"id": 2, "name": "b"}),
        change("update", 1, {"id": 1, "name": "c", "tags": ["x", "y"]}),
        change("delete", 2),
        {"type": "users", "key": "3", "operation": "set", "value": {"id": 3, "name": "of a session"}},
        change("upsert", 4, {"id": 4, "name": "d"}),
        {"type": "users", "key": "4", "operation": "remove", "old_value": {"id": 4}},
    ]
    for _ in range(2):
        assert apply(connection, how, messages) == LoadResult(7, 0)
        assert held(connection) == {1: "c", 3: "of a session"}
    assert connection.execute("SELECT tags FROM users WHERE id = 1").fetchone() == (["x", "y"],)
    apply(connection, how, [change("delete", 1), change("insert", 1, {"id": 1, "name": "e"})], 7)
    apply(connection, how, [*messages[2:4], change("update", 3, {"id": 3, "name": "older"})], 2)
    assert held(connection) == {1: "e", 3: "of a session"}, "older changes do not replace newer ones"


def test_omitted_columns_keep_their_values(connection: Connection) -> None:
    how = upserts.prepare(connection, USERS)
    messages = [
        change("insert", 1, {"id": 1, "name": "a", "about": "large"}),
        change("update", 1, {"id": 1, "name": "b"}, unchanged=["about"]),
        change("update", 2, {"id": 2, "name": "never seen"}, unchanged=["about"]),
        change("update", 1, {"id": 1, "name": "c"}, unchanged=["about", "tags"]),
    ]
    apply(connection, how, messages)
    assert held(connection) == {1: ("c", "large"), 2: "never seen"}
    apply(connection, how, [change("update", 1, {"id": 1, "name": "d"})], 4)
    assert held(connection) == {1: "d", 2: "never seen"}


def test_resets_and_recreated_streams_start_with_an_empty_table(connection: Connection) -> None:
    how = upserts.prepare(connection, USERS)
    old, new = "00000000000000aa", "00000000000000bb"
    reset = {"headers": {"control": "reset"}}
    first = [change("insert", n, {"id": n, "name": "a"}) for n in (1, 2)]
    apply(connection, how, [*first, reset, change("insert", 3, {"id": 3, "name": "b"})], incarnation=old)
    assert held(connection) == {3: "b"}
    apply(connection, how, [change("insert", 4, {"id": 4, "name": "c"})], incarnation=new)
    assert held(connection) == {4: "c"}
    apply(connection, how, [change("insert", 5, {"id": 5, "name": "d"})], 1, incarnation=new)
    assert held(connection) == {4: "c", 5: "d"}


def test_invalid_change_is_a_dead_letter_and_blocks_nothing(connection: Connection) -> None:
    connection.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text CHECK (name <> 'bad'), tags text[], about text)"
    )
    how = upserts.prepare(connection, USERS)
    messages: list[Any] = [
        change("insert", 1, {"id": 1, "name": "a"}),
        17,
        {"no": "change"},
        change("append", 1, "chunk"),
        change("insert", 2, {"id": 2, "name": "bad"}),
        change("insert", 3, {"id": "three", "name": "c"}),
        change("insert", 4, {"id": 4, "name": "d"}),
    ]
    assert apply(connection, how, messages) == LoadResult(2, 5)
    assert held(connection) == {1: "a", 4: "d"}
    reasons = connection.execute("SELECT reason FROM headwater.dead_letters ORDER BY ds_offset").fetchall()
    assert [row[0] for row in reasons] == ["not-an-object", "not-a-change", "not-a-change", "constraint", "refused"]


@pytest.mark.parametrize("seed", range(3))
def test_any_split_into_batches_and_any_repeat_gives_the_same_table(connection: Connection, seed: int) -> None:
    chance = random.Random(seed)
    expected: dict[int, str] = {}
    messages: list[Any] = []
    for n in range(300):
        key, fate = chance.randrange(12), chance.random()
        if fate < 0.25:
            messages.append(change(chance.choice(["delete", "remove"]), key))
            expected.pop(key, None)
        elif fate < 0.27:
            messages.append({"headers": {"control": "reset"}})
            expected.clear()
        else:
            messages.append(change(chance.choice(["insert", "update", "upsert"]), key, {"id": key, "name": str(n)}))
            expected[key] = str(n)
    how = upserts.prepare(connection, USERS)
    done = 0
    while done < len(messages):
        start = max(0, done - chance.randrange(20))
        end = min(len(messages), done + chance.randrange(1, 60))
        apply(connection, how, messages[start:end], start)
        done = end
    assert held(connection) == expected


def test_missing_key_is_added_or_the_error_says_how(connection: Connection) -> None:
    connection.execute("CREATE TABLE users (id int, name text, tags text[], about text)")
    connection.execute("INSERT INTO users (id) VALUES (1), (1)")
    with pytest.raises(PostgresSetupError, match="Create it with: CREATE UNIQUE INDEX"):
        upserts.prepare(connection, USERS)
    connection.execute("TRUNCATE users")
    upserts.prepare(connection, USERS)
    with pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute("INSERT INTO users (id) VALUES (1), (1)")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"streams": ("a",)}, "needs a key"),
        ({"streams": ("a",), "columns": {"id": "value.id"}, "key": ("other",)}, "needs a key"),
        ({"prefix": "a", "columns": {"id": "value.id"}, "key": ("id",)}, "need a column for"),
        ({"mode": "append", "streams": ("a",), "key": ("id",)}, "only allowed in the mode upsert"),
    ],
)
def test_invalid_settings_are_rejected_with_the_reason(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ToPostgres(**{"mode": "upsert", **given})


def test_table_is_copied_through_its_change_stream_and_another_is_filled_from_a_bucket(
    spark: SparkSession, streams: Streams, bucket: Bucket, postgres_url: str, tmp_path: Path
) -> None:
    environment = JobEnvironment(streams.root, str(tmp_path), postgres=postgres_url)
    source = FromPostgres(
        name="copy-out",
        tables=(FollowedTable("users", "users-changes", "changes"),),
        slot="copy_out",
        publication="copy_out",
    )
    columns = {"id": "value.id", "name": "value.name", "about": "value.about"}
    target = ToPostgres(
        name="copy-in",
        streams=("users-changes",),
        table="copied",
        mode="upsert",
        key=("id",),
        columns=columns,
        types={"id": "int"},
    )
    sessions = ToPostgres(name="of-bucket", bucket=bucket.name, streams=("chat",), table="chat_events")
    bucket.filled("chat", [{"key": "k", "type": "message", "operation": "set"}])
    everything = "SELECT id, name, about FROM {} ORDER BY id"
    jobs = JobSupervisor(spark, environment, [source, target, sessions])

    def until(look: Callable[[], Any], wanted: Callable[[Any], bool]) -> None:
        def polled() -> Any:
            jobs.poll()
            return look()

        eventually(polled, wanted)

    with psycopg.connect(postgres_url, autocommit=True) as sql:
        sql.execute("CREATE TABLE users (id int PRIMARY KEY, name text, about text)")
        sql.execute("ALTER TABLE users ALTER about SET STORAGE EXTERNAL")
        sql.execute("INSERT INTO users SELECT n, 'name ' || n, repeat('x', 3000) FROM generate_series(1, 20) AS n")
        try:
            until(lambda: count(postgres_url, "copied"), lambda found: found == 20)
            sql.execute("UPDATE users SET name = 'changed' WHERE id <= 5")
            sql.execute("DELETE FROM users WHERE id > 15")
            sql.execute("INSERT INTO users VALUES (200, 'last', NULL)")
            until(lambda: rows(postgres_url, "SELECT id FROM copied WHERE id = 200"), bool)
            until(lambda: count(postgres_url, "chat_events"), bool)
        finally:
            jobs.stop()
        assert rows(postgres_url, everything.format("copied")) == sql.execute(everything.format("users")).fetchall()
        assert rows(postgres_url, "SELECT stream_name FROM chat_events") == [("chat",)]


def count(url: str, table: str) -> int:
    with psycopg.connect(url) as sql:
        if sql.execute("SELECT to_regclass(%s)", [table]).fetchone() == (None,):
            return 0
        row = sql.execute(f"SELECT count(*) FROM {table}").fetchone()
        assert row is not None
        return int(row[0])
