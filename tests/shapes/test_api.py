"""The Shape API as a client sees it: offsets, handles, headers, live reads, subsets, and errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.shapes.serving import Reading, Shapes

Table = Callable[[str], str]
ITEMS = "id int PRIMARY KEY, title text, n int"


def filled(running: Shapes, name: str, rows: int = 3) -> str:
    running.sql(f"INSERT INTO {name} SELECT i, 't' || i, i FROM generate_series(1, {rows}) i")
    return name


# -- the log -----------------------------------------------------------------------------------------------------


def test_snapshot_rows_have_text_values_and_no_lsn(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS), 1)
    first = running.get(table=name)
    assert first.status_code == 200
    row, end = first.json()
    assert row == {
        "key": f'"public"."{name}"/"1"',
        "value": {"id": "1", "title": "t1", "n": "1"},
        "headers": {"operation": "insert", "relation": ["public", name]},
    }
    assert end["headers"]["control"] == "snapshot-end"
    assert int(end["headers"]["xmin"]) <= int(end["headers"]["xmax"])
    assert "electric-up-to-date" not in first.headers
    assert first.headers["electric-offset"] == "0_inf"
    assert json.loads(first.headers["electric-schema"])["id"] == {"type": "int4", "not_null": True, "pk_index": 0}


def test_changes_have_lsn_txid_and_the_last_one_is_marked(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    reading = running.everything(table=name)
    running.sql(f"BEGIN; UPDATE {name} SET title = 'x' WHERE id = 1; DELETE FROM {name} WHERE id = 2; COMMIT")
    before = len(reading.messages)
    reading.live()
    update, delete, control = reading.messages[before:]
    assert update["value"] == {"id": "1", "title": "x"}
    assert delete["value"] == {"id": "2"}
    assert "last" not in update["headers"]
    assert delete["headers"]["last"] is True
    assert update["headers"]["txids"] == delete["headers"]["txids"]
    assert update["headers"]["op_position"] < delete["headers"]["op_position"]
    assert reading.offset == f"{delete['headers']['lsn']}_{delete['headers']['op_position']}"
    assert int(control["headers"]["global_last_seen_lsn"]) > int(delete["headers"]["lsn"])


def test_large_table_is_sent_in_chunks_with_separate_urls(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS), 20_000)
    reading = running.everything(table=name)
    assert len(reading.rows) == 20_000
    assert reading.responses >= 3
    again = running.everything(table=name)
    assert again.handle == reading.handle
    assert again.rows == reading.rows


def test_a_long_poll_without_changes_ends_up_to_date_and_moves_the_cursor(running: Shapes, table: Table) -> None:
    reading = running.everything(table=table(ITEMS))
    offset = reading.offset
    first = reading.step(live="true")
    assert [message["headers"]["control"] for message in first.json()] == ["up-to-date"]
    assert first.headers["electric-has-data"] == "false"
    assert reading.offset == offset
    cursor = first.headers["electric-cursor"]
    assert reading.step(live="true", cursor=cursor).headers["electric-cursor"] != cursor


def test_events_carry_changes_and_up_to_date(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    reading = running.everything(table=name)
    query = {"table": name, "offset": reading.offset, "handle": reading.handle, "live": "true", "live_sse": "true"}
    with running.http.stream("GET", running.url, params=query) as response:
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["electric-handle"] == reading.handle
        assert "electric-cursor" in response.headers
        events = messages_of(response)
        assert next(events)["headers"]["control"] == "up-to-date"
        running.sql(f"INSERT INTO {name} VALUES (4, 'four', 4)")
        insert, current = next(events), next(events)
        assert insert["value"] == {"id": "4", "title": "four", "n": "4"}
        assert current["headers"]["control"] == "up-to-date"
        # The client continues at an offset that it derives from this LSN, and must not get the insert again.
        reading.offset = f"{current['headers']['global_last_seen_lsn']}_0"
        running.sql(f"INSERT INTO {name} VALUES (5, 'five', 5)")
        assert next(events)["value"]["id"] == "5"
    reading.live()
    assert [message["value"]["id"] for message in reading.messages if "lsn" in message["headers"]] == ["5"]


def messages_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_offset_now_skips_what_exists(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    now = running.get(table=name, offset="now")
    assert [message["headers"]["control"] for message in now.json()] == ["up-to-date"]
    assert "electric-up-to-date" in now.headers
    reading = Reading(running, {"table": name})
    reading.handle, reading.offset = now.headers["electric-handle"], now.headers["electric-offset"]
    running.sql(f"INSERT INTO {name} VALUES (10, 'ten', 10)")
    reading.live()
    assert [row["id"] for row in reading.rows.values()] == ["10"]


def test_changes_only_has_no_snapshot(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    reading = running.everything(table=name, log="changes_only")
    assert not reading.rows
    running.sql(f"INSERT INTO {name} VALUES (10, 'ten', 10)")
    reading.live()
    assert [row["id"] for row in reading.rows.values()] == ["10"]


def test_replica_full_sends_whole_rows_and_old_values(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    reading = running.everything(table=name, replica="full")
    running.sql(f"UPDATE {name} SET title = 'x' WHERE id = 1")
    running.sql(f"DELETE FROM {name} WHERE id = 2")
    reading.live(lambda one: len(one.rows) == 2)
    update, delete = (message for message in reading.messages if "lsn" in message["headers"])
    assert update["value"] == {"id": "1", "title": "x", "n": "1"}
    assert update["old_value"] == {"title": "t1"}
    assert delete["value"] == {"id": "2", "title": "t2", "n": "2"}


def test_only_requested_columns_are_sent(running: Shapes, table: Table) -> None:
    name = filled(running, table('id int PRIMARY KEY, "Title, x" text, n int'))
    reading = running.everything(table=name, columns='id,"Title, x"')
    assert reading.rows[f'"public"."{name}"/"1"'] == {"id": "1", "Title, x": "t1"}
    running.sql(f"UPDATE {name} SET n = 100 WHERE id = 1")
    running.sql(f"UPDATE {name} SET \"Title, x\" = 'new' WHERE id = 1")
    reading.live(lambda one: any("lsn" in message["headers"] for message in one.messages))
    changes = [message["value"] for message in reading.messages if "lsn" in message["headers"]]
    assert changes == [{"id": "1", "Title, x": "new"}], "a change of a column outside the shape is not sent"


def test_a_changed_key_is_a_delete_and_an_insert(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS), 1)
    reading = running.everything(table=name)
    running.sql(f"UPDATE {name} SET id = 9 WHERE id = 1")
    reading.live()
    delete, insert = (message for message in reading.messages if "lsn" in message["headers"])
    assert delete["headers"]["key_change_to"] == insert["key"]
    assert insert["headers"]["key_change_from"] == delete["key"]
    assert list(reading.rows) == [f'"public"."{name}"/"9"']


def test_a_table_without_a_key_is_keyed_by_all_its_columns(running: Shapes, table: Table) -> None:
    name = table("b text, a text")
    running.sql(f"INSERT INTO {name} VALUES ('x/y', NULL)")
    reading = running.everything(table=name)
    assert list(reading.rows) == [f'"public"."{name}"/_/"x//y"']
    running.sql(f"UPDATE {name} SET a = 'z'")
    reading.live()
    assert list(reading.rows) == [f'"public"."{name}"/"z"/"x//y"']


def test_rows_that_start_or_stop_matching_are_inserted_or_deleted(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS), 10)
    reading = running.everything(table=name, where="n > $1", **{"params[1]": "8"})
    assert {row["id"] for row in reading.rows.values()} == {"9", "10"}
    running.sql(f"BEGIN; UPDATE {name} SET n = 0 WHERE id = 9; UPDATE {name} SET n = 50 WHERE id = 1; COMMIT")
    reading.live()
    moved = [message["headers"]["operation"] for message in reading.messages if "lsn" in message["headers"]]
    assert moved == ["delete", "insert"]
    assert {row["id"] for row in reading.rows.values()} == {"1", "10"}


def test_a_rolled_back_transaction_is_never_seen(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS), 1)
    reading = running.everything(table=name)
    running.sql(f"BEGIN; INSERT INTO {name} VALUES (2, 'no', 2); ROLLBACK")
    running.sql(f"INSERT INTO {name} VALUES (3, 'yes', 3)")
    reading.live()
    assert {row["id"] for row in reading.rows.values()} == {"1", "3"}


# -- caches ------------------------------------------------------------------------------------------------------


def test_responses_have_cache_control(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    first = running.get(table=name)
    assert first.headers["cache-control"] == ("public, max-age=604800, s-maxage=3600, stale-while-revalidate=2629746")
    handle, offset = first.headers["electric-handle"], first.headers["electric-offset"]
    assert first.headers["etag"] == f'"{handle}:-1:{offset}"'
    second = running.get(table=name, handle=handle, offset=offset)
    assert second.headers["cache-control"] == "public, max-age=60, stale-while-revalidate=300"
    running.sql(f"INSERT INTO {name} VALUES (100, 'x', 1)")
    live = running.get(table=name, handle=handle, offset=offset, live="true")
    assert live.headers["cache-control"] == "public, max-age=5, stale-while-revalidate=5"
    unchanged = running.http.get(
        running.url, params={"table": name, "offset": "-1"}, headers={"If-None-Match": first.headers["etag"]}
    )
    assert unchanged.status_code == 304
    assert not unchanged.content


# -- other shapes and other handles ------------------------------------------------------------------------------


def test_unknown_handle_is_redirected_to_the_current_one(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    moved = running.get(table=name, handle="123-456", offset="0_inf")
    assert moved.status_code == 409
    assert moved.json() == [{"headers": {"control": "must-refetch"}}]
    assert moved.headers["cache-control"] == "public, max-age=60, must-revalidate"
    fresh = running.get(table=name, expired_handle="123-456")
    assert fresh.headers["electric-handle"] == moved.headers["electric-handle"] != "123-456"


def test_handle_of_another_definition_is_redirected(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    whole = running.get(table=name).headers["electric-handle"]
    other = running.get(table=name, where="n = 1", handle=whole, offset="0_inf")
    assert other.status_code == 409
    assert other.headers["electric-handle"] != whole


def test_deleted_shape_gets_a_new_handle(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    reading = running.everything(table=name)
    old = reading.handle

    def wait() -> None:
        # Again if nothing has happened within the time of a long-poll.
        while reading.step(live="true").status_code == 200:
            pass

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert running.http.delete(running.url, params={"table": name, "handle": old}).status_code == 202
    waiting.join(60)
    assert reading.last is not None
    assert reading.last.status_code == 409, "the waiting reader is notified immediately"
    assert reading.last.headers["electric-handle"] != old
    reading.catch_up()
    assert reading.handle != old
    assert len(reading.rows) == 3


def test_a_truncated_table_starts_a_new_shape(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    reading = running.everything(table=name)
    old = reading.handle
    running.sql(f"TRUNCATE {name}")
    running.sql(f"INSERT INTO {name} VALUES (7, 'seven', 7)")
    reading.live(lambda one: len(one.rows) == 1)
    assert reading.handle != old
    assert [row["id"] for row in reading.rows.values()] == ["7"]


def test_an_added_column_starts_a_new_shape(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    reading = running.everything(table=name)
    old = reading.handle
    running.sql(f"ALTER TABLE {name} ADD COLUMN extra text DEFAULT 'd'")
    reading.live(lambda one: one.handle != old)
    assert {row["extra"] for row in reading.rows.values()} == {"d"}
    running.sql(f"UPDATE {name} SET extra = 'e' WHERE id = 1")
    reading.live(lambda one: one.rows[f'"public"."{name}"/"1"']["extra"] == "e")


def test_equal_definitions_share_a_shape(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS))
    one = running.get(table=name, where="n = 1 AND title = 't1'")
    two = running.get(table=f"public.{name}", where="(n=1) and (title = $1)", **{"params[1]": "t1"})
    other = running.get(table=name, where="n = 2")
    assert one.headers["electric-handle"] == two.headers["electric-handle"] != other.headers["electric-handle"]


# -- subsets -----------------------------------------------------------------------------------------------------


def test_subsets_by_post_and_by_get_are_the_same(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS), 20)
    base: dict[str, Any] = {"table": name, "offset": "now", "log": "changes_only"}
    body: dict[str, Any] = {"where": "n > $1", "params": {"1": 5}, "order_by": "n DESC", "limit": 3, "offset": 1}
    posted = running.http.post(running.url, params=base, json=body)
    assert posted.status_code == 200, posted.text
    flat: dict[str, Any] = {f"subset__{key}": value for key, value in body.items()}
    flat["subset__params"] = json.dumps(body["params"])
    got = running.http.get(running.url, params={**base, **flat})
    assert [row["value"]["id"] for row in posted.json()["data"]] == ["19", "18", "17"]
    assert [row["value"] for row in got.json()["data"]] == [row["value"] for row in posted.json()["data"]]
    metadata = posted.json()["metadata"]
    assert set(metadata) == {"snapshot_mark", "database_lsn", "xmin", "xmax", "xip_list"}
    assert posted.json()["data"][0]["headers"]["snapshot_mark"] == metadata["snapshot_mark"]
    assert posted.headers["electric-snapshot"] == "true"
    assert posted.headers["cache-control"] == "no-cache"
    assert "electric-handle" in posted.headers
    assert "electric-schema" in posted.headers


def test_a_subset_stays_within_its_shape(running: Shapes, table: Table) -> None:
    name = filled(running, table(ITEMS), 20)
    query = {"table": name, "offset": "now", "where": "n <= 3"}
    rows = running.http.post(running.url, params=query, json={"where": "n >= 3 OR true"}).json()["data"]
    assert sorted(row["value"]["id"] for row in rows) == ["1", "2", "3"]


def test_a_subset_and_the_log_meet_without_a_gap(running: Shapes, table: Table) -> None:
    """The metadata identifies transactions that the subset did not see; they are in the log."""
    import psycopg

    name = filled(running, table(ITEMS), 2)
    now = running.get(table=name, offset="now", log="changes_only")
    reading = Reading(running, {"table": name, "log": "changes_only"})
    reading.handle, reading.offset = now.headers["electric-handle"], now.headers["electric-offset"]
    with psycopg.connect(running.postgres.url) as open_transaction:
        found = open_transaction.execute(b"SELECT pg_current_xact_id()::text").fetchone()
        assert found is not None
        open_transaction.execute(f"INSERT INTO {name} VALUES (3, 'late', 3)".encode())
        query = {"table": name, "log": "changes_only", "offset": reading.offset, "handle": reading.handle}
        subset = running.http.post(running.url, params=query, json={"where": "true = true"}).json()
    assert sorted(row["value"]["id"] for row in subset["data"]) == ["1", "2"]
    metadata = subset["metadata"]
    assert found[0] in metadata["xip_list"] or int(found[0]) >= int(metadata["xmax"])
    reading.live()
    late = next(message for message in reading.messages if "lsn" in message["headers"])
    assert late["headers"]["txids"] == [int(found[0])]
    assert int(late["headers"]["lsn"]) >= int(metadata["database_lsn"])


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ({"table": ""}, "table"),
        ({"table": "unheard_of"}, "table"),
        ({"table": "pg_catalog.pg_authid"}, "table"),
        ({"table": "headwater.shapes"}, "table"),
        ({"table": "a.b.c"}, "table"),
        ({"table": "t0; DROP TABLE t0"}, "table"),
        ({"columns": "id,nothing"}, "columns"),
        ({"columns": "title"}, "columns"),
        ({"columns": "id;"}, "columns"),
        ({"where": "n IN (SELECT 1)"}, "where"),
        ({"where": "n = 'x'"}, "where"),
        ({"where": "n = $1"}, "where"),
        ({"offset": "x"}, "offset"),
        ({"offset": "1_2"}, "handle"),
        ({"live": "true"}, "live"),
        ({"live_sse": "true"}, "live_sse"),
        ({"live": "maybe"}, "live"),
        ({"replica": "half"}, "replica"),
        ({"log": "some"}, "log"),
        ({"subset__limit": "5"}, "subset"),
        ({"subset__limit": "0", "subset__order_by": "n"}, "subset"),
        ({"subset__order_by": "n; DROP TABLE t0"}, "subset"),
        ({"subset__where": "n IN (SELECT 1)"}, "subset"),
        ({"subset__params": "[{}]"}, "params"),
        ({"subset__params": "x"}, "subset"),
        ({"params": "x", "where": "n = $1"}, "params"),
    ],
)
def test_invalid_requests_are_400_in_electrics_format(
    running: Shapes, refused_table: str, query: dict[str, str], parameter: str
) -> None:
    response = running.get(**{"table": refused_table, **query})
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["message"] == "Invalid request"
    assert list(body["errors"]) == [parameter]
    assert all(isinstance(reason, str) and reason for reason in body["errors"][parameter])
    assert response.headers["cache-control"] == "no-store"


@pytest.fixture(scope="module")
def refused_table(running: Shapes) -> str:
    from tests.shapes.conftest import TABLES

    name = TABLES[-1]
    running.sql(f"CREATE TABLE {name} ({ITEMS})")
    return name


def test_a_missing_offset_is_400(running: Shapes, refused_table: str) -> None:
    response = running.http.get(running.url, params={"table": refused_table})
    assert response.status_code == 400
    assert list(response.json()["errors"]) == ["offset"]


def test_repeated_parameter_is_400(running: Shapes, refused_table: str) -> None:
    response = running.http.get(f"{running.url}?table={refused_table}&table=other&offset=-1")
    assert response.status_code == 400


@pytest.mark.parametrize(
    "body", [b"[", b"[]", b'{"where": 5}', b'{"limit": true}', b'{"params": {"1": null}, "where": "n = $1"}']
)
def test_an_invalid_body_is_400(running: Shapes, refused_table: str, body: bytes) -> None:
    query = {"table": refused_table, "offset": "now"}
    assert running.http.post(running.url, params=query, content=body).status_code == 400


def test_large_bodies_and_urls_are_refused(running: Shapes, refused_table: str) -> None:
    query = {"table": refused_table, "offset": "now"}
    assert running.http.post(running.url, params=query, content=b" " * (2 << 20)).status_code == 413
    assert running.http.get(running.url, params={**query, "where": "x" * 60_000}).status_code == 414


def test_other_paths_and_methods(running: Shapes) -> None:
    root = running.url.removesuffix("/v1/shape")
    assert running.http.get(f"{root}/v1/nothing").status_code == 404
    assert running.http.put(running.url).status_code == 405
    health = running.http.get(f"{root}/v1/health")
    assert (health.status_code, health.json()) == (200, {"status": "active"})


def test_pages_of_allowed_origins_can_read_every_header(running: Shapes, refused_table: str) -> None:
    query = {"table": refused_table, "offset": "-1"}
    origin = {"Origin": "http://localhost:5173"}
    response = running.http.get(running.url, params=query, headers=origin)
    assert response.headers["access-control-allow-origin"] == "http://localhost:5173"
    for name in ("electric-handle", "electric-offset", "electric-schema", "electric-cursor", "electric-up-to-date"):
        assert name in response.headers["access-control-expose-headers"]
    preflight = running.http.options(running.url, headers={**origin, "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    foreign = running.http.get(running.url, params=query, headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in foreign.headers


def test_a_foreign_host_name_is_refused(running: Shapes, refused_table: str) -> None:
    """A page of another site whose name resolves to this machine must not read tables (DNS rebinding)."""
    query = {"table": refused_table, "offset": "-1"}
    assert running.http.get(running.url, params=query, headers={"Host": "evil.example"}).status_code == 421
