"""Limits on what clients can make grow, and restrictions of the database."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.shapes.serving import Reading, Shapes, shapes

ITEMS = "id int PRIMARY KEY, title text, n int"


@pytest.fixture(scope="module")
def small() -> Iterator[Shapes]:
    limits = {
        "DS_SHAPES__MAX_SHAPES": "3",
        "DS_SHAPES__EVICT_AFTER_SECS": "0.2",
        "DS_SHAPES__IDLE_SECS": "6",
        "DS_SHAPES__MAX_LOG_BYTES": "20000",
        "DS_SHAPES__MAX_SUBSET_BYTES": "5000",
        "DS_SHAPES__TAIL_BYTES": "1000",
        "DS_SHAPES__CHUNK_BYTES": "3000",
        "DS_SHAPES__SECRET": "a secret",
        "DS_SHAPES__CHECK_INTERVAL_SECS": "0.2",
    }
    with shapes("items, foreign_items, wide", **limits) as started:
        started.http.params = started.http.params.set("secret", "a secret")
        started.sql(f"CREATE TABLE items ({ITEMS})")
        started.sql("INSERT INTO items SELECT i, 't' || i, i FROM generate_series(1, 200) i")
        yield started


def stored(small: Shapes) -> set[str]:
    return {row[0] for row in small.sql("SELECT handle FROM headwater.shapes WHERE state = 'complete'")}


def test_unused_shape_is_evicted_and_its_streams_are_deleted(small: Shapes) -> None:
    first = small.everything(table="items", where="n = 0")
    stream = f"{small.streams_url}/v1/stream/__shapes__/{first.handle}/changes"
    assert small.http.head(stream).status_code == 200
    for number in range(1, 8):
        while (response := small.get(table="items", where=f"n = {number}")).status_code == 503:
            assert "max_shapes" in response.json()["message"]
            assert int(response.headers["retry-after"]) > 0
        assert response.status_code == 200
    query = {"table": "items", "where": "n = 0", "offset": first.offset, "handle": first.handle}
    while (moved := small.http.get(small.url, params=query)).status_code == 503:
        pass
    assert moved.status_code == 409
    while small.http.head(stream).status_code != 404:
        pass
    assert len(stored(small)) <= 3


def test_an_idle_shape_is_dropped(small: Shapes) -> None:
    small.everything(table="items", where="n = 100")
    while stored(small):
        pass


def test_shape_with_a_log_that_grows_too_large_is_replaced(small: Shapes) -> None:
    reading = small.everything(table="items")
    old = reading.handle
    with psycopg.connect(small.postgres.url, autocommit=True) as connection:
        for number in range(300):
            connection.execute(b"UPDATE items SET title = %s WHERE id = 1", [f"change {number}"])
    reading.live(lambda one: one.handle != old and one.rows['"public"."items"/"1"']["title"] == "change 299")


def test_slow_reader_gets_changes_that_are_no_longer_in_memory(small: Shapes) -> None:
    """More changes than fit in the tail are the same when read from any offset."""
    reading = small.everything(table="items", where="id = 2", replica="full")
    start, handle = reading.offset, reading.handle
    with psycopg.connect(small.postgres.url, autocommit=True) as connection:
        for number in range(40):
            connection.execute(b"UPDATE items SET n = %s WHERE id = 2", [number])
    reading.live(lambda one: one.rows['"public"."items"/"2"']["n"] == "39")
    changes = [one for one in reading.messages if "lsn" in one["headers"]]
    assert len(changes) == 40
    offsets = [start, *(f"{one['headers']['lsn']}_{one['headers']['op_position']}" for one in changes)]
    for place in (0, 1, 5, 20, 39):
        again = Reading(small, {"table": "items", "where": "id = 2", "replica": "full"})
        again.handle, again.offset = handle, offsets[place]
        again.rows = {'"public"."items"/"2"': {}}
        again.catch_up()
        assert [one for one in again.messages if "lsn" in one["headers"]] == changes[place:]


def test_a_subset_beyond_the_limit_is_refused(small: Shapes) -> None:
    query = {"table": "items", "offset": "now"}
    refused = small.http.post(small.url, params=query, json={"where": "true = true"})
    assert refused.status_code == 400
    assert "limit" in refused.json()["errors"]["subset"][0]
    assert small.http.post(small.url, params=query, json={"order_by": "n", "limit": 3}).status_code == 200


def test_secret_is_required(small: Shapes) -> None:
    for given in ({"secret": "wrong"}, {"secret": ""}):
        refused = small.http.get(small.url, params={"table": "items", "offset": "-1", **given})
        assert refused.status_code == 401
        assert "secret" in refused.json()["message"]


def test_error_for_a_table_of_another_owner_has_the_statement_to_run(small: Shapes) -> None:
    """The role can publish the table (its group owns the publication), but cannot alter it."""
    small.sql("CREATE ROLE plain LOGIN REPLICATION")
    small.sql("GRANT CREATE ON DATABASE durable_streams TO plain; GRANT USAGE ON SCHEMA public TO plain")
    small.sql(f"CREATE TABLE foreign_items ({ITEMS}); GRANT SELECT ON foreign_items TO plain")
    url = small.postgres.url.replace("postgres@", "plain@")
    other = Shapes(
        small.postgres,
        small.streams,
        small.directory,
        DS_SHAPES__TABLES="foreign_items",
        DS_SHAPES__SLOT="plain_slot",
        DS_SHAPES__PUBLICATION="plain_publication",
        POSTGRES_URL=url,
    )
    small.sql("CREATE SCHEMA IF NOT EXISTS headwater; GRANT ALL ON SCHEMA headwater TO plain")
    small.sql("GRANT ALL ON ALL TABLES IN SCHEMA headwater TO plain")
    small.sql("CREATE PUBLICATION plain_publication FOR TABLE foreign_items")
    other.start()
    try:
        refused = other.get(table="foreign_items", where="n = 1")
        assert refused.status_code == 400, refused.text
        reason = refused.json()["errors"]["table"][0]
        assert 'ALTER TABLE "public"."foreign_items" REPLICA IDENTITY FULL;' in reason
        # Without a condition the old row is not needed.
        reading = other.everything(table="foreign_items")
        small.sql("INSERT INTO foreign_items VALUES (1, 'a', 1), (2, 'b', 2)")
        small.sql("UPDATE foreign_items SET n = 3 WHERE id = 1; DELETE FROM foreign_items WHERE id = 2")
        reading.live(lambda one: [row["n"] for row in one.rows.values()] == ["3"])
        small.sql("ALTER TABLE foreign_items REPLICA IDENTITY FULL")
        assert len(other.everything(table="foreign_items", where="n = 3").rows) == 1
    finally:
        other.http.close()
        other.kill()


def test_unpublished_generated_columns_are_rejected_unless_excluded(small: Shapes) -> None:
    """Postgres before 18 publishes no generated columns, and later releases only stored ones."""
    kind = "VIRTUAL" if small.sql("SHOW server_version_num")[0][0] >= "180000" else "STORED"
    small.sql(f"CREATE TABLE wide (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) {kind})")
    assert list(small.get(table="wide").json()["errors"]) == ["columns"]
    assert small.get(table="wide", columns="id").status_code == 200


def test_lost_slot_replaces_every_shape(small: Shapes) -> None:
    reading = small.everything(table="items", where="n > 190")
    old = reading.handle
    small.stop()
    small.sql("SELECT pg_drop_replication_slot('headwater_shapes')")
    small.sql("UPDATE items SET n = 1000 WHERE id = 150")
    small.start()
    reading.live(lambda one: one.handle != old)
    assert reading.rows['"public"."items"/"150"']["n"] == "1000"
