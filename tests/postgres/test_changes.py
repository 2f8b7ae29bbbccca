"""Logical decoding against a real Postgres: every type exactly, every kind of change, whole transactions, slots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headwater.postgres import slots, snapshots
from headwater.postgres.catalog import table_name, user_types
from headwater.postgres.connections import Connection, PostgresSetupError, connect
from headwater.postgres.formats import ChangeOrigin, TableFormat, messages_of
from headwater.postgres.pgoutput import Transaction
from headwater.stack.database import LocalPostgres
from tests.postgres.databases import database, packaged_release

SLOT = "under_test"
PUBLICATION = "under_test"


@pytest.fixture(scope="module")
def running() -> Iterator[LocalPostgres]:
    with database() as own:
        yield own


@pytest.fixture
def connection(running: LocalPostgres) -> Iterator[Connection]:
    with connect(running.url) as session:
        yield session
        slots.drop(session, SLOT)
        session.execute(f"DROP PUBLICATION IF EXISTS {PUBLICATION}")
        session.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public; DROP SCHEMA IF EXISTS headwater CASCADE")


def follow(connection: Connection, *tables: str, full_rows: bool = False) -> int:
    slots.publish(connection, PUBLICATION, [table_name(table) for table in tables], full_rows=full_rows)
    return slots.create(connection, SLOT).confirmed_lsn


def since(connection: Connection, start: int) -> list[Transaction]:
    end = slots.flushed_lsn(connection)
    said = slots.messages(connection, SLOT, PUBLICATION, end)
    return list(slots.transactions(connection, said, start, end))


def plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def test_every_type_is_transferred_exactly(connection: Connection) -> None:
    connection.execute("CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
    connection.execute("CREATE TYPE pair AS (a int, b text)")
    described = {
        "b": ("boolean", "true", True),
        "i2": ("smallint", "-32768", -32768),
        "i8": ("bigint", "9223372036854775807", 9223372036854775807),
        "n": ("numeric", "'12345678901234567890.123456789012345678900'", "12345678901234567890.123456789012345678900"),
        "nan": ("numeric", "'NaN'", "NaN"),
        "f4": ("real", "1.1", 1.1),
        "f8": ("double precision", "0.1::float8 + 0.2::float8", 0.30000000000000004),
        "fnan": ("double precision", "'NaN'", "NaN"),
        "finf": ("double precision", "'-Infinity'", "-Infinity"),
        "big": ("double precision", "1e300", 1e300),
        "t": ("text", "E'quote \" back \\\\ line\\n \u00fc \U0001f600'", 'quote " back \\ line\n \u00fc \U0001f600'),
        "empty": ("text", "''", ""),
        "null_": ("text", "NULL", None),
        "vc": ("varchar(10)", "'abc'", "abc"),
        "c": ("char(4)", "'ab'", "ab  "),
        "by": ("bytea", "'\\x00ff10'::bytea", "\\x00ff10"),
        "ts": ("timestamp", "'2024-02-29 12:34:56.789012'", "2024-02-29 12:34:56.789012"),
        "tz": ("timestamptz", "'2024-02-29 12:34:56.789012+05:30'", "2024-02-29 07:04:56.789012+00"),
        "tinf": ("timestamptz", "'infinity'", "infinity"),
        "bc": ("date", "'0044-03-15 BC'", "0044-03-15 BC"),
        "iv": ("interval", "'1 year 2 days 3.5 seconds'", "P1Y2DT3.5S"),
        "u": ("uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        "j": ("json", "'{\"a\": [1, 2.50]}'", {"a": [1, 2.5]}),
        "jb": ("jsonb", "'{\"big\": 12345678901234567890}'", {"big": 12345678901234567890}),
        "jn": ("jsonb", "'null'", None),
        "ia": ("int[]", "'{1,NULL,3}'", [1, None, 3]),
        "i2d": ("int[]", "'{{1,2},{3,4}}'", [[1, 2], [3, 4]]),
        "based": ("int[]", "'[0:1]={7,8}'", [7, 8]),
        "ta": ("text[]", "ARRAY['a,b', 'c\"d', 'e\\f', 'NULL', NULL, '']", ["a,b", 'c"d', "e\\f", "NULL", None, ""]),
        "tb": ("text[]", "ARRAY['{x}']", ["{x}"]),
        "noa": ("text[]", "'{}'", []),
        "ja": ("jsonb[]", "ARRAY['{\"a\": \"b,c\"}'::jsonb]", [{"a": "b,c"}]),
        "na": ("numeric[]", "'{1.10,NaN}'", ["1.10", "NaN"]),
        "boxes": ("box[]", "'{(1,1),(0,0);(2,2),(1,1)}'", ["(1,1),(0,0)", "(2,2),(1,1)"]),
        "m": ("mood", "'ok'", "ok"),
        "ma": ("mood[]", "'{sad,ok}'", ["sad", "ok"]),
        "d": ("positive", "7", 7),
        "p": ("pair", "'(1,x)'", "(1,x)"),
        "r": ("int4range", "'[1,5)'", "[1,5)"),
        "ip": ("inet", "'10.0.0.1/8'", "10.0.0.1/8"),
    }  # fmt: skip
    columns = ", ".join(f"{name} {kind}" for name, (kind, _, _) in described.items())
    values = ", ".join(value for _, value, _ in described.values())
    connection.execute(f"CREATE TABLE typed (id int PRIMARY KEY, {columns})".encode())
    start = follow(connection, "typed")
    connection.execute(f"INSERT INTO typed VALUES (1, {values})".encode())
    (transaction,) = since(connection, start)
    row = plain(transaction.changes[0].new)
    assert row == {"id": 1} | {name: wanted for name, (_, _, wanted) in described.items()}
    # The first copy spells the same row alike.
    snapshots.prepare(connection)
    copy = snapshots.take(connection, SLOT, table_name("typed"), with_rows=True)
    (copied,) = snapshots.read(connection, copy, 1, 1)
    assert msgspec.json.encode(copied) == msgspec.json.encode(transaction.changes[0].new)
    assert user_types(connection), "the domain and the arrays of made types were read from the catalog"


def test_every_kind_of_change_is_read_and_rolled_back_ones_are_not(connection: Connection) -> None:
    connection.execute("CREATE TABLE items (id int PRIMARY KEY, body text); CREATE TABLE other (id int PRIMARY KEY)")
    connection.execute("CREATE TABLE hidden (id int)")
    connection.execute("ALTER TABLE items ALTER body SET STORAGE EXTERNAL")
    start = follow(connection, "items", "other")
    large = "x" * 20_000
    with connection.transaction():
        connection.execute("INSERT INTO items VALUES (1, %s), (2, 'b')", [large])
        connection.execute("INSERT INTO other VALUES (9)")
        connection.execute("INSERT INTO hidden VALUES (1)")
        with connection.transaction(force_rollback=True):
            connection.execute("INSERT INTO items VALUES (3, 'never')")
    connection.execute("UPDATE items SET id = 11 WHERE id = 1")
    connection.execute("UPDATE items SET body = 'c' WHERE id = 2")
    connection.execute("DELETE FROM items WHERE id = 2")
    connection.execute("ALTER TABLE items ADD extra int DEFAULT 5")
    connection.execute("INSERT INTO items VALUES (4, NULL, 6)")
    connection.execute("ALTER TABLE items REPLICA IDENTITY FULL")
    connection.execute("UPDATE items SET extra = 7 WHERE id = 11")
    connection.execute("TRUNCATE items, other")
    found = since(connection, start)
    told_ = [
        [(change.operation, change.relation.table, plain(change.new), plain(change.old)) for change in one.changes]
        for one in found
    ]
    assert told_ == [
        [
            ("insert", "items", {"id": 1, "body": large}, None),
            ("insert", "items", {"id": 2, "body": "b"}, None),
            ("insert", "other", {"id": 9}, None),
        ],
        [("update", "items", {"id": 11}, {"id": 1})],
        [("update", "items", {"id": 2, "body": "c"}, None)],
        [("delete", "items", None, {"id": 2})],
        [("insert", "items", {"id": 4, "body": None, "extra": 6}, None)],
        [
            (
                "update",
                "items",
                {"id": 11, "extra": 7, "body": large},
                {"id": 11, "body": large, "extra": 5},
            )
        ],
        [("truncate", "items", None, None), ("truncate", "other", None, None)],
    ]
    assert found[1].changes[0].unchanged == ("body",), "a large value that did not change is not taken for NULL"
    assert found[5].changes[0].unchanged == ()


def test_reading_repeats_until_the_slot_is_advanced_and_start_and_end_hold(connection: Connection) -> None:
    connection.execute("CREATE TABLE items (id int PRIMARY KEY)")
    start = follow(connection, "items")
    for number in range(5):
        connection.execute("INSERT INTO items VALUES (%s)", [number])
    found = since(connection, start)
    assert [plain(one.changes[0].new)["id"] for one in found] == [0, 1, 2, 3, 4]
    assert [one.end_lsn for one in since(connection, start)] == [one.end_lsn for one in found]
    said = slots.messages(connection, SLOT, PUBLICATION, found[3].end_lsn)
    between = list(slots.transactions(connection, said, found[1].end_lsn, found[3].end_lsn))
    assert [one.end_lsn for one in between] == [found[2].end_lsn, found[3].end_lsn]
    end, messages = slots.last_commit(connection, SLOT, PUBLICATION, slots.flushed_lsn(connection), 4)
    assert end in {found[0].end_lsn, found[1].end_lsn}
    assert messages >= 4
    slots.advance(connection, SLOT, found[2].end_lsn)
    slots.advance(connection, SLOT, found[0].end_lsn)
    assert [one.end_lsn for one in since(connection, start)] == [found[3].end_lsn, found[4].end_lsn]
    state = slots.state(connection, SLOT)
    assert state is not None
    assert state.confirmed_lsn == found[2].end_lsn
    with pytest.raises(slots.SlotLostError, match="another client advanced"):
        slots.check(state, SLOT, start)
    assert slots.drop(connection, SLOT)
    with pytest.raises(slots.SlotLostError, match="does not exist"):
        slots.check(slots.state(connection, SLOT), SLOT, start)


def test_start_position_holds_after_a_crash_moved_the_slot_back() -> None:
    with database() as own:
        with connect(own.url) as connection:
            connection.execute("CREATE TABLE items (id int PRIMARY KEY)")
            start = follow(connection, "items")
            connection.execute("CHECKPOINT")
            connection.execute("INSERT INTO items VALUES (1)")
            (first,) = since(connection, start)
            slots.advance(connection, SLOT, first.end_lsn)
        own.kill()
        own.start()
        with connect(own.url) as connection:
            connection.execute("INSERT INTO items VALUES (2)")
            (second,) = since(connection, first.end_lsn)
            assert plain(second.changes[0].new) == {"id": 2}


def test_slot_beyond_its_size_limit_is_reported_as_lost() -> None:
    with database(max_slot_wal_keep_size="1MB", min_wal_size="32MB", max_wal_size="32MB") as own, connect(own.url) as c:
        c.execute("CREATE TABLE items (id int PRIMARY KEY, pad text)")
        start = follow(c, "items")
        for _ in range(4):
            c.execute("SELECT pg_switch_wal()")
            c.execute("CREATE TABLE IF NOT EXISTS noise AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)")
            c.execute("DROP TABLE noise")
            c.execute("CHECKPOINT")
        state = slots.state(c, SLOT)
        assert state is not None
        assert state.is_lost
        with pytest.raises(slots.SlotLostError, match="max_slot_wal_keep_size"):
            slots.check(state, SLOT, start)


@pytest.mark.parametrize("running_transactions", [1, 3])
def test_a_first_copy_and_the_changes_meet_without_gap_or_overlap(
    running: LocalPostgres, connection: Connection, running_transactions: int
) -> None:
    connection.execute("CREATE TABLE items (id int PRIMARY KEY, n int)")
    connection.execute("INSERT INTO items SELECT n, 0 FROM generate_series(1, 10) AS n")
    start = follow(connection, "items")
    connection.execute("UPDATE items SET n = 1 WHERE id <= 3")
    writers = [connect(running.url, autocommit=False) for _ in range(running_transactions)]
    for number, writer in enumerate(writers):
        writer.execute("UPDATE items SET n = 100 WHERE id = %s", [5 + number])
        writer.execute("INSERT INTO items VALUES (%s, 7)", [50 + number])
    snapshots.prepare(connection)
    copy = snapshots.take(connection, SLOT, table_name("items"), with_rows=True)
    for writer in writers:
        writer.commit()
        writer.close()
    connection.execute("DELETE FROM items WHERE id = 10")
    state = {plain(row)["id"]: plain(row)["n"] for row in snapshots.read(connection, copy, 1, copy.rows)}
    assert 50 not in state
    dropped = 0
    for transaction in since(connection, start):
        if copy.seen.has(transaction.xid, transaction.end_lsn):
            dropped += 1
            continue
        for change in transaction.changes:
            if change.operation == "delete":
                state.pop(plain(change.old)["id"])
            else:
                row = plain(change.new)
                assert change.operation == "update" or row["id"] not in state
                state[row["id"]] = row["n"]
    assert dropped == 1, "the update before the copy is in the copy alone"
    assert state == dict(connection.execute("SELECT id, n FROM items").fetchall())
    snapshots.forget(connection, SLOT)
    assert snapshots.load(connection, SLOT, table_name("items")) is None


def test_formats_encode_a_change_as_row_state_change_and_envelope(connection: Connection) -> None:
    connection.execute("CREATE TABLE items (id int PRIMARY KEY, title text)")
    start = follow(connection, "items")
    connection.execute("INSERT INTO items VALUES (1, 'a')")
    connection.execute("UPDATE items SET id = 2, title = 'b'")
    connection.execute("DELETE FROM items")
    connection.execute("TRUNCATE items")
    found = since(connection, start)

    def as_(form: Any, stream: str = "s", operations: str = "insert update delete truncate") -> list[tuple[str, Any]]:
        how = TableFormat(stream, form, ("id",), frozenset(operations.split()))
        return [
            (target, json.loads(message))
            for one in found
            for change in one.changes
            for target, message in messages_of(change, ChangeOrigin(one.xid, one.end_lsn, one.committed_at), how)
        ]

    assert as_("rows", operations="insert") == [("s", {"id": 1, "title": "a"})]
    changes = [message for _, message in as_("changes")]
    assert [(one.get("key"), one["headers"].get("operation")) for one in changes] == [
        ("1", "insert"),
        ("1", "delete"),
        ("2", "insert"),
        ("2", "delete"),
        (None, None),
    ]
    assert changes[0]["type"] == "items"
    assert changes[0]["value"] == {"id": 1, "title": "a"}
    assert changes[0]["headers"]["txid"] == str(found[0].xid)
    assert changes[-1]["headers"]["control"] == "reset"
    envelopes = [message for _, message in as_("envelopes")]
    assert [one["op"] for one in envelopes] == ["c", "d", "u", "d", "t"]
    assert envelopes[2]["after"] == {"id": 2, "title": "b"}
    assert envelopes[2]["before"] == {"id": 1}
    assert [target for target, _ in as_("changes", "items/{key}")] == ["items/1", "items/1", "items/2", "items/2"]


def test_full_rows_do_not_make_changes_of_tables_with_generated_columns_fail() -> None:
    """With REPLICA IDENTITY FULL, Postgres 18 refuses UPDATE if a generated column is not published."""
    with packaged_release(), database() as own, connect(own.url) as connection:
        connection.execute("CREATE TABLE made (id int PRIMARY KEY, n int GENERATED ALWAYS AS (id * 2) STORED)")
        connection.execute("CREATE TABLE computed (id int PRIMARY KEY, n int GENERATED ALWAYS AS (id * 2) VIRTUAL)")
        connection.execute("INSERT INTO made VALUES (1); INSERT INTO computed VALUES (1)")
        follow(connection, "made")
        snapshots.prepare(connection)
        copied = snapshots.take(connection, SLOT, table_name("made"), with_rows=True)
        assert [column.name for column in copied.columns] == ["id"]
        slots.publish(connection, PUBLICATION, [table_name("made")], full_rows=True)
        with pytest.raises(PostgresSetupError, match="virtual generated column"):
            slots.publish(connection, PUBLICATION, [table_name("computed")], full_rows=True)
        start = slots.flushed_lsn(connection)
        connection.execute("UPDATE made SET id = 2; UPDATE computed SET id = 2")
        (change,) = [change for one in since(connection, start) for change in one.changes]
        assert plain([change.old, change.new]) == [{"id": 1, "n": 2}, {"id": 2, "n": 4}]
