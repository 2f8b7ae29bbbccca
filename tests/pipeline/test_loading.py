"""Loading a batch into a table, without Spark: nothing is lost or duplicated, and invalid rows are set aside."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest

from headwater.pipeline.loading import BatchPart, LoadResult, load, statements
from headwater.pipeline.postgres_writer import WriterPlan, write_events
from headwater.postgres import tables
from headwater.postgres.catalog import table_name
from headwater.postgres.connections import Connection, PostgresSetupError, RetryingConnection, connect
from headwater.postgres.tables import SESSION_EVENTS, EventMapping
from tests.otel.receiver import otlp_receiver

LIMIT = 10_000
REFERENCE = EventMapping(table_name("session_events"), SESSION_EVENTS, {})


@pytest.fixture
def connection(postgres_url: str) -> Iterator[Connection]:
    with connect(postgres_url) as session:
        yield session


def batch(values: list[bytes], stream: str = "s", first: int = 0, incarnation: str = "") -> pa.Table:
    count = len(values)
    suffix = f"_{incarnation}" if incarnation else ""
    return pa.table(
        {
            "stream": [stream] * count,
            "offset": [f"{first + n + 1:016x}_{0:016x}{suffix}" for n in range(count)],
            "position": pa.array(range(first, first + count), pa.int64()),
            "content_type": ["application/json"] * count,
            "value": pa.array(values, pa.binary()),
        }
    )


def test_batch_has_a_span_in_the_trace_of_each_traced_event(connection: Connection, postgres_url: str) -> None:
    trace, sender = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traced = {"key": "traced", "traceparent": f"00-{trace}-{sender}-01"}
    values = [json.dumps(event).encode() for event in ({"key": "plain"}, traced, {"traceparent": 7}, traced)]
    tables.prepare(connection, REFERENCE)
    with otlp_receiver() as receiver:
        plan = WriterPlan(
            "job", "session_events", statements(connection, REFERENCE), LIMIT, 10.0, otel_endpoint=receiver.url
        )
        assert write_events(postgres_url, plan, BatchPart("job", "q", 7, 0), batch(values)) == LoadResult(4, 0)
        found = receiver.wait_for_span(lambda span: span.trace_id == trace, "a span in the trace of the event")
        assert (found.parent_id, found.service) == (sender, "headwater-sync")
        assert found.attributes["db.collection.name"] == "session_events"
        assert found.attributes["messaging.batch.message_count"] == 4
        spans = [span for span in receiver.spans if not span.parent_id]
        assert [link.span_id.hex() for span in spans for link in span.span.links] == [sender]
        assert [link.span_id.hex() for link in found.span.links] == [spans[0].span_id]
        assert len(receiver.spans) == 2, "one span for the batch, one in the trace"


def test_every_event_is_in_the_table_or_a_dead_letter_and_a_repeat_changes_nothing(connection: Connection) -> None:
    tables.prepare(connection, REFERENCE)
    connection.execute("ALTER TABLE session_events ADD CHECK (event_key <> 'refuse me')")
    how = statements(connection, REFERENCE)
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
        part = BatchPart("job", "query", seed, 0)
        bad = sum(value in kinds for value in values)
        assert load(connection, how, part, events, LIMIT) == LoadResult(len(values) - bad, bad)
        assert load(connection, how, part, events, LIMIT) == LoadResult(len(values) - bad, bad)
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


def test_database_error_leaves_no_rows(connection: Connection) -> None:
    tables.prepare(connection, REFERENCE)
    how = statements(connection, REFERENCE)
    connection.execute("SET default_transaction_read_only = on")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        load(connection, how, BatchPart("job", "q", 0, 0), batch([b'{"a": 1}', b"[]"]), LIMIT)
    connection.execute("SET default_transaction_read_only = off")
    assert connection.execute("SELECT count(*) FROM headwater.dead_letters").fetchone() == (0,)
    assert load(connection, how, BatchPart("job", "q", 0, 0), batch([b'{"a": 1}', b"[]"]), LIMIT) == LoadResult(1, 1)


def test_reference_table_gets_a_key_and_duplicate_events_are_an_error(connection: Connection) -> None:
    connection.execute(
        "CREATE TABLE session_events (id SERIAL PRIMARY KEY, stream_name TEXT NOT NULL, event_key TEXT,"
        " event_type TEXT, operation TEXT, payload JSONB NOT NULL, ds_offset TEXT,"
        " received_at TIMESTAMPTZ DEFAULT NOW())"
    )
    connection.execute(
        "INSERT INTO session_events (stream_name, payload, ds_offset) SELECT 's', '{}', 'o' FROM generate_series(1, 2)"
    )
    with pytest.raises(PostgresSetupError, match="contains some events twice") as refused:
        tables.prepare(connection, REFERENCE)
    connection.execute(str(refused.value).rpartition("with: ")[2])
    assert connection.execute("SELECT id FROM session_events").fetchall() == [(1,)], "the first one is kept"
    tables.prepare(connection, REFERENCE)
    tables.prepare(connection, REFERENCE)
    loaded = load(connection, statements(connection, REFERENCE), BatchPart("j", "q", 0, 0), batch([b"{}"]), LIMIT)
    assert loaded == LoadResult(1, 0)
    with pytest.raises(PostgresSetupError, match="no column nowhere"):
        tables.prepare(connection, EventMapping(REFERENCE.table, {**SESSION_EVENTS, "nowhere": "x"}, {}))


def test_created_table_has_the_documented_columns_and_accepts_application_rows(connection: Connection) -> None:
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
    loaded = load(connection, statements(connection, REFERENCE), BatchPart("j", "q", 0, 0), batch([b"{}"]), LIMIT)
    assert loaded == LoadResult(1, 0)
    assert connection.execute("SELECT count(*) FROM session_events").fetchone() == (3,)


# -- incarnations ---------------------------------------------------------------------------------------------------

OLD, NEW = "00000000000000aa", "00000000000000bb"
ORDERS = EventMapping(
    table_name("orders"), {"s": "@stream", "o": "@offset", "amount": "amount", "note": "note.text"}, {}
)
BEFORE_THE_UPGRADE = """
CREATE SCHEMA headwater;
CREATE TABLE headwater.dead_letters (
    id BIGSERIAL PRIMARY KEY, job TEXT NOT NULL, stream_name TEXT NOT NULL, ds_offset TEXT NOT NULL,
    reason TEXT NOT NULL, detail TEXT NOT NULL, content_type TEXT NOT NULL, value BYTEA NOT NULL,
    received_at TIMESTAMPTZ NOT NULL DEFAULT NOW(), UNIQUE (job, stream_name, ds_offset));
CREATE TABLE session_events (
    id BIGSERIAL PRIMARY KEY, stream_name text NOT NULL, event_key text, event_type text, operation text,
    payload jsonb NOT NULL, ds_offset text NOT NULL, received_at TIMESTAMPTZ DEFAULT NOW());
CREATE UNIQUE INDEX session_events_stream_offset_key ON session_events (stream_name, ds_offset);
"""


def events_of(numbers: range) -> list[bytes]:
    return [json.dumps({"key": str(n), "n": n}).encode() for n in numbers]


def upgraded(connection: Connection, numbers: range = range(3)) -> None:
    """A database of the release before offsets had incarnations, prepared by this release."""
    connection.execute(BEFORE_THE_UPGRADE)
    for n in numbers:
        connection.execute(
            "INSERT INTO session_events (stream_name, event_key, payload, ds_offset) VALUES ('s', %s, %s, %s)",
            [str(n), json.dumps({"key": str(n), "n": n}), f"{n + 1:016x}_{0:016x}"],
        )
    connection.execute(
        "INSERT INTO headwater.dead_letters (job, stream_name, ds_offset, reason, detail, content_type, value)"
        " VALUES ('job', 's', %s, 'not-an-object', '', 'application/json', '[9]')",
        [f"{100:016x}_{0:016x}"],
    )
    tables.prepare(connection, REFERENCE)


def bring(connection: Connection, events: pa.Table, mapped: EventMapping = REFERENCE) -> None:
    loaded = load(connection, statements(connection, mapped), BatchPart("job", "q", 0, 0), events, LIMIT)
    assert loaded.events + loaded.dead == events.num_rows


def held(connection: Connection) -> list[tuple[int, str]]:
    return connection.execute("SELECT (payload->>'n')::int, ds_incarnation FROM session_events ORDER BY id").fetchall()


def test_event_loaded_before_and_after_the_upgrade_is_one_row(
    connection: Connection,
) -> None:
    upgraded(connection)
    bring(connection, batch(events_of(range(5)), incarnation=OLD))
    bring(connection, batch(events_of(range(5)), incarnation=OLD))
    assert held(connection) == [(0, ""), (1, ""), (2, ""), (3, OLD), (4, OLD)]


def test_batch_planned_before_the_upgrade_gives_the_same_rows_after_it(connection: Connection) -> None:
    upgraded(connection)
    bring(connection, batch(events_of(range(2, 4)), first=2))
    bring(connection, batch(events_of(range(4, 6)), first=4, incarnation=OLD))
    bring(connection, batch(events_of(range(2, 6)), first=2))
    assert held(connection) == [(0, ""), (1, ""), (2, ""), (3, ""), (4, OLD), (5, OLD)]


def test_row_changed_by_the_application_is_still_recognised_after_the_upgrade(connection: Connection) -> None:
    upgraded(connection)
    bring(connection, batch(events_of(range(3, 4)), first=3, incarnation=OLD))
    connection.execute("UPDATE session_events SET payload = '{\"n\": -1}' WHERE event_key = '1'")
    bring(connection, batch(events_of(range(4)), incarnation=OLD))
    assert held(connection) == [(0, ""), (-1, ""), (2, ""), (3, OLD)]


@pytest.mark.parametrize("continues", [True, False], ids=["continued before", "repeated before"])
def test_stream_created_again_after_the_upgrade_has_its_own_rows(connection: Connection, continues: bool) -> None:
    """Even if every event has the offset and the content of an old one."""
    upgraded(connection)
    first = 3 if continues else 0
    bring(connection, batch(events_of(range(first, 4)), first=first, incarnation=OLD))
    bring(connection, batch(events_of(range(4)), incarnation=NEW))
    bring(connection, batch(events_of(range(4)), incarnation=NEW))
    assert held(connection) == [(0, ""), (1, ""), (2, ""), (3, OLD), (0, NEW), (1, NEW), (2, NEW), (3, NEW)]


def test_rows_of_a_stream_deleted_before_the_upgrade_are_not_mistaken_for_new_ones(
    connection: Connection,
) -> None:
    """A server in memory mode is upgraded: all its streams are new, with the same offsets as the old ones."""
    upgraded(connection)
    bring(connection, batch(events_of(range(50, 52)), incarnation=NEW))
    bring(connection, batch(events_of(range(52, 54)), first=2, incarnation=NEW))
    assert held(connection) == [(0, ""), (1, ""), (2, ""), (50, NEW), (51, NEW), (52, NEW), (53, NEW)]


def test_events_that_cannot_be_compared_with_old_rows_are_new_events(connection: Connection) -> None:
    upgraded(connection)
    bring(connection, batch([b'{"key": "\\u0000"}', b'{"n": 7}'], incarnation=NEW))
    assert held(connection) == [(0, ""), (1, ""), (2, ""), (7, NEW)]


def test_a_mapping_without_the_payload_compares_its_fields(connection: Connection) -> None:
    connection.execute("CREATE TABLE orders (s text, o text, amount int, note varchar(20), PRIMARY KEY (s, o))")
    connection.execute("INSERT INTO orders VALUES ('s', %s, 5, 'five')", [f"{1:016x}_{0:016x}"])
    tables.prepare(connection, ORDERS)
    five, six = b'{"amount": 5, "note": {"text": "five"}}', b'{"amount": 6, "note": {"text": "100 %s"}}'
    bring(connection, batch([five, six], incarnation=OLD), ORDERS)
    bring(connection, batch([six, five], incarnation=NEW), ORDERS)
    rows = connection.execute("SELECT amount, ds_incarnation FROM orders ORDER BY ds_incarnation, o").fetchall()
    assert rows == [(5, ""), (6, OLD), (6, NEW), (5, NEW)]


@pytest.mark.parametrize(
    ("key", "kept"),
    [
        ("UNIQUE (stream_name, ds_offset)", "u"),
        ("CONSTRAINT mine UNIQUE (ds_offset, stream_name)", "u"),
        ("PRIMARY KEY (stream_name, ds_offset)", "p"),
    ],
)
def test_user_defined_key_gets_the_incarnation(connection: Connection, key: str, kept: str) -> None:
    connection.execute(
        "CREATE TABLE session_events (stream_name text, event_key text, event_type text, operation text,"
        f" payload jsonb NOT NULL, ds_offset text, {key})"
    )
    tables.prepare(connection, REFERENCE)
    tables.prepare(connection, REFERENCE)
    found = connection.execute(
        "SELECT contype::text, array_length(conkey, 1) FROM pg_constraint"
        " WHERE conrelid = 'session_events'::regclass AND contype IN ('p', 'u')"
    ).fetchall()
    assert found == [(kept, 3)]
    for incarnation in (OLD, NEW, OLD):
        bring(connection, batch(events_of(range(2)), incarnation=incarnation))
    assert connection.execute("SELECT count(*) FROM session_events").fetchone() == (4,)


def test_error_for_a_role_without_rights_has_the_statement_for_the_owner(
    connection: Connection,
) -> None:
    connection.execute(BEFORE_THE_UPGRADE)
    tables.prepare(connection, ORDERS)
    connection.execute("CREATE ROLE pipeline_guest")
    try:
        connection.execute(f'GRANT CREATE ON DATABASE "{connection.info.dbname}" TO pipeline_guest')
        connection.execute("GRANT ALL ON SCHEMA headwater, public TO pipeline_guest")
        connection.execute("SET ROLE pipeline_guest")
        with pytest.raises(PostgresSetupError, match=r"ALTER TABLE .*ADD COLUMN .*ds_incarnation"):
            tables.prepare(connection, REFERENCE)
    finally:
        connection.execute("RESET ROLE; DROP OWNED BY pipeline_guest; DROP ROLE pipeline_guest")


def test_dead_letters_are_kept_for_each_incarnation_and_once_over_the_upgrade(connection: Connection) -> None:
    upgraded(connection)
    for incarnation in (OLD, OLD, NEW):
        value = b"[9]" if incarnation == OLD else b"[10]"
        bring(connection, batch([value], first=99, incarnation=incarnation))
    letters = connection.execute("SELECT value, ds_incarnation FROM headwater.dead_letters ORDER BY id").fetchall()
    assert letters == [(b"[9]", ""), (b"[10]", NEW)]


def test_json_lists_fill_array_columns(connection: Connection) -> None:
    connection.execute("CREATE TABLE tagged (s text, o text, tags text[], grid int[][], whens timestamptz[])")
    columns = {"s": "@stream", "o": "@offset", "tags": "value.tags", "grid": "grid", "whens": "whens"}
    mapped = EventMapping(table_name("tagged"), columns, {})
    tables.prepare(connection, mapped)
    how = statements(connection, mapped)
    events = [
        {"value": {"tags": ["a", 'b,"c"', None, "{d}"]}, "grid": [[1, 2], [3, 4]], "whens": ["2026-11-17T00:00:00Z"]},
        {"value": {"tags": []}},
        {"value": {"tags": "{x,y}"}},
        {"value": {"tags": [1]}, "grid": ["not a number"]},
    ]
    done = load(connection, how, BatchPart("j", "q", 0, 0), batch([json.dumps(one).encode() for one in events]), LIMIT)
    assert done == LoadResult(3, 1)
    found = connection.execute("SELECT tags, grid, cardinality(whens) FROM tagged ORDER BY o").fetchall()
    assert found == [
        (["a", 'b,"c"', None, "{d}"], [[1, 2], [3, 4]], 1),
        ([], None, None),
        (["x", "y"], None, None),
    ]
    assert connection.execute("SELECT reason FROM headwater.dead_letters").fetchall() == [("refused",)]


def test_connection_of_a_query_that_has_ended_is_closed(postgres_url: str) -> None:
    opened: list[Connection] = []
    database = RetryingConnection(postgres_url, 60.0)
    database.run(opened.append)
    assert not opened[0].closed
    del database
    gc.collect()
    assert opened[0].closed
