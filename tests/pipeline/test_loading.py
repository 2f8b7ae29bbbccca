"""Loading a batch into a table, without Spark: everything is somewhere, nothing is there twice, bad rows stay alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest

from headwater.pipeline.loading import Loaded, Part, load
from headwater.postgres import tables
from headwater.postgres.catalog import table_name
from headwater.postgres.connecting import Connection, SetUpWrong, connect
from headwater.postgres.tables import SESSION_EVENTS, Mapped

LIMIT = 10_000
REFERENCE = Mapped(table_name("session_events"), SESSION_EVENTS, {})


@pytest.fixture
def connection(postgres_url: str) -> Iterator[Connection]:
    with connect(postgres_url) as session:
        yield session


def batch(values: list[bytes], stream: str = "s", first: int = 0) -> pa.Table:
    count = len(values)
    return pa.table(
        {
            "stream": [stream] * count,
            "offset": [f"{first + n + 1:016x}_{0:016x}" for n in range(count)],
            "position": pa.array(range(first, first + count), pa.int64()),
            "content_type": ["application/json"] * count,
            "value": pa.array(values, pa.binary()),
        }
    )


def test_any_mixture_is_in_the_table_or_among_the_letters_and_again_changes_nothing(connection: Connection) -> None:
    tables.prepare(connection, REFERENCE)
    connection.execute("ALTER TABLE session_events ADD CHECK (event_key <> 'refuse me')")
    insertion = tables.insertion(connection, REFERENCE)
    for seed in range(8):
        chance = random.Random(seed)
        kinds = [
            b'{"key": "refuse me"}',
            b"[1]",
            b'{"key": "\\u0000"}',
            b'"x"',
            b'{"pad": "' + b"p" * LIMIT + b'"}',
            b"\xff",
        ]
        values = [
            chance.choice(kinds)
            if chance.random() < chance.choice((0.0, 0.05, 0.6))
            else json.dumps({"key": f'{n} "quoted", \\ and\nlines \u00e9', "n": n}).encode()
            for n in range(chance.randrange(1, 120))
        ]
        events = batch(values, f"stream {seed}")
        part = Part("job", "query", seed, 0)
        bad = sum(value in kinds for value in values)
        assert load(connection, insertion, part, events, LIMIT) == Loaded(len(values) - bad, bad)
        assert load(connection, insertion, part, events, LIMIT) == Loaded(len(values) - bad, bad)
        rows = connection.execute(
            "SELECT ds_offset, payload FROM session_events WHERE stream_name = %s ORDER BY id", [f"stream {seed}"]
        ).fetchall()
        wanted = [
            (events["offset"][n].as_py(), json.loads(value)) for n, value in enumerate(values) if value not in kinds
        ]
        assert rows == wanted, seed
        letters = connection.execute(
            "SELECT value FROM headwater.dead_letters WHERE stream_name = %s", [f"stream {seed}"]
        ).fetchall()
        assert sorted(row[0] for row in letters) == sorted(value for value in values if value in kinds)
        assert connection.execute("SELECT batch, dead FROM headwater.batches").fetchone() == (seed, bad)


def test_a_trouble_of_the_database_leaves_nothing_behind(connection: Connection) -> None:
    tables.prepare(connection, REFERENCE)
    insertion = tables.insertion(connection, REFERENCE)
    connection.execute("SET default_transaction_read_only = on")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        load(connection, insertion, Part("job", "q", 0, 0), batch([b'{"a": 1}', b"[]"]), LIMIT)
    connection.execute("SET default_transaction_read_only = off")
    assert connection.execute("SELECT count(*) FROM headwater.dead_letters").fetchone() == (0,)
    assert load(connection, insertion, Part("job", "q", 0, 0), batch([b'{"a": 1}', b"[]"]), LIMIT) == Loaded(1, 1)


def test_the_reference_table_gets_a_key_and_one_that_has_events_twice_is_refused(connection: Connection) -> None:
    connection.execute(
        "CREATE TABLE session_events (id SERIAL PRIMARY KEY, stream_name TEXT NOT NULL, event_key TEXT,"
        " event_type TEXT, operation TEXT, payload JSONB NOT NULL, ds_offset TEXT,"
        " received_at TIMESTAMPTZ DEFAULT NOW())"
    )
    connection.execute(
        "INSERT INTO session_events (stream_name, payload, ds_offset) SELECT 's', '{}', 'o' FROM generate_series(1, 2)"
    )
    with pytest.raises(SetUpWrong, match="holds some events twice") as refused:
        tables.prepare(connection, REFERENCE)
    connection.execute(str(refused.value).rpartition("with: ")[2])
    assert connection.execute("SELECT id FROM session_events").fetchall() == [(1,)], "the first one is kept"
    tables.prepare(connection, REFERENCE)
    tables.prepare(connection, REFERENCE)
    loaded = load(connection, tables.insertion(connection, REFERENCE), Part("j", "q", 0, 0), batch([b"{}"]), LIMIT)
    assert loaded == Loaded(1, 0)
    with pytest.raises(SetUpWrong, match="no column nowhere"):
        tables.prepare(connection, Mapped(REFERENCE.table, {**SESSION_EVENTS, "nowhere": "x"}, {}))


def test_a_table_that_we_make_is_the_documents_and_takes_rows_of_an_application(connection: Connection) -> None:
    """Seed 000, lines 344 to 354: `id` is SERIAL, `ds_offset` may be missing."""
    tables.prepare(connection, REFERENCE)
    described = connection.execute(
        "SELECT column_name, data_type, is_nullable FROM information_schema.columns WHERE table_name ="
        " 'session_events' AND table_schema = 'public'"
    )
    columns = {name: (kind, nullable) for name, kind, nullable in described.fetchall()}
    assert columns["id"] == ("integer", "NO")
    assert columns["ds_offset"] == ("text", "YES")
    assert columns["stream_name"] == ("text", "NO")
    assert columns["payload"] == ("jsonb", "NO")
    for _ in range(2):
        connection.execute("INSERT INTO session_events (stream_name, event_type, payload) VALUES ('s', 'own', '{}')")
    loaded = load(connection, tables.insertion(connection, REFERENCE), Part("j", "q", 0, 0), batch([b"{}"]), LIMIT)
    assert loaded == Loaded(1, 0)
    assert connection.execute("SELECT count(*) FROM session_events").fetchone() == (3,)
