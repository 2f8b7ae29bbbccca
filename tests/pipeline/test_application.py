"""The application: it restarts failed jobs, gives up on permanent errors, and reports both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest

from headwater.pipeline import slot_monitor
from headwater.pipeline.application import Application
from headwater.pipeline.settings import load
from headwater.pipeline.status import QueryStatus
from headwater.postgres import slots
from headwater.postgres.connections import connect
from tests.pipeline.test_to_postgres import count, rows
from tests.serving import Server, serve
from tests.spark.streams import Streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE_S = 240.0

Seen = tuple[dict[str, QueryStatus], dict[str, dict[str, Any]]]
Steps = Iterator[Callable[[Seen], bool]]


def play(file: Path, steps: Steps, *, server: str, postgres: str) -> int:
    """Run the application until the steps are done; return the exit code. Each step yields a condition to wait for.

    It runs in this thread, so that it uses the existing session and leaves it running.
    """
    flags = {
        "server": server,
        "postgres": postgres,
        "checkpoints": str(file.parent / "checkpoints"),
        "metrics_port": 0,
        "probe": False,
        "restart_wait": 0.2,
        "restart_wait_max": 1.0,
    }
    waits_for = next(steps)
    deadline = time.monotonic() + PATIENCE_S

    def show(queries: list[QueryStatus], found: dict[str, dict[str, Any]]) -> None:
        nonlocal waits_for, deadline
        if not waits_for(({one.name: one for one in queries}, found)):
            assert time.monotonic() < deadline, f"timed out: {queries} {found}"
            return
        deadline = time.monotonic() + PATIENCE_S
        try:
            waits_for = next(steps)
        except StopIteration:
            waits_for = never
            application.stop()

    def never(_: Seen) -> bool:
        return False

    application = Application(load(file, {}, flags), show)
    return application.run()


def test_slot_that_retains_too_much_causes_a_warning_then_is_dropped_and_the_other_job_continues(
    spark: SparkSession,
    server: Server,
    streams: Streams,
    postgres_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_monitor, "_INTERVAL_S", 0.5)
    file = tmp_path / "pipeline.toml"
    file.write_text(
        "[[to_postgres]]\nname = 'in'\nstreams = ['lagging-in']\n"
        "[[from_postgres]]\nname = 'out'\nslot = 'lagging'\npublication = 'lagging'\n"
        "tables = [{ table = 'big', stream = 'lagging-out' }]\n"
        f"lag_bytes_warn = {1 << 20}\nlag_bytes_max = {8 << 20}\n",
        encoding="utf-8",
    )
    write = "INSERT INTO big (body) SELECT repeat(md5(n::text), 32) FROM generate_series(1, {}) AS n"
    with psycopg.connect(postgres_url, autocommit=True) as sql:
        sql.execute("CREATE TABLE big (id serial PRIMARY KEY, body text)")
        sql.execute("ALTER TABLE big ALTER body SET STORAGE EXTERNAL")

        def steps() -> Steps:
            yield lambda seen: seen[0]["in"].status == seen[0]["out"].status == "running" and "lagging" in seen[1]
            # A closed stream rejects appends: the job fails repeatedly, and its slot does not advance.
            streams.http.post(f"{streams.root}/lagging-out", headers={"Stream-Closed": "true"}).raise_for_status()
            sql.execute(write.format(2_000))
            yield lambda seen: seen[0]["out"].restarts > 0
            yield lambda seen: seen[1]["lagging"]["error"] is not None
            sql.execute(write.format(8_000))
            yield lambda seen: seen[0]["out"].status == "failed"
            streams.append("lagging-in", [{"key": "after"}])
            yield lambda _: count(postgres_url, "session_events")() == 1

        code = play(file, steps(), server=server.url, postgres=postgres_url)
    assert code == 1, "a job ended with an error"
    assert "MiB of WAL for this slot" in caplog.text
    assert "more than lag_bytes_max; it was dropped" in caplog.text
    with connect(postgres_url) as connection:
        assert slots.state(connection, "lagging") is None


def test_job_waits_for_a_full_server_without_loss_or_duplicates(
    spark: SparkSession, postgres_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(
        "[[from_postgres]]\nname = 'out'\nslot = 'roomless'\npublication = 'roomless'\n"
        "tables = [{ table = 'things', stream = 'things' }]\n",
        encoding="utf-8",
    )
    with (
        serve(
            DS_STORAGE__MODE="memory", DS_LIMITS__MAX_MEMORY_BYTES=str(1 << 20), DS_LIMITS__MAX_STREAM_BYTES="0"
        ) as small,
        psycopg.connect(postgres_url, autocommit=True) as sql,
        httpx.Client(base_url=f"{small.url}/v1/stream", timeout=60) as http,
    ):
        sql.execute("CREATE TABLE things (id serial PRIMARY KEY, body text)")
        insert = "INSERT INTO things (body) SELECT repeat('x', 1000) FROM generate_series(1, 300)"

        def steps() -> Steps:
            yield lambda seen: seen[0]["out"].status == "running" and "roomless" in seen[1]
            http.put("/ballast", headers={"Content-Type": "text/plain"}, content=b"b" * 900_000).raise_for_status()
            sql.execute(insert)
            sql.execute(insert)
            yield lambda seen: "413" in str(seen[0]["out"].error)
            http.delete("/ballast").raise_for_status()
            yield lambda _: len(published(http)) >= 600

        assert play(file, steps(), server=small.url, postgres=postgres_url) == 0
        assert published(http) == list(range(1, 601))


def published(http: httpx.Client) -> list[int]:
    answer = http.get("/things", params={"offset": "-1"})
    return [one["id"] for one in answer.json()]


def test_job_waits_for_a_full_database_disk_without_loss(
    spark: SparkSession, server: Server, streams: Streams, postgres_url: str, tmp_path: Path
) -> None:
    """A trigger raises the error of a full disk: the same class of error, from the same statement."""
    file = tmp_path / "pipeline.toml"
    file.write_text("[[to_postgres]]\nname = 'in'\nstreams = ['full-in']\n", encoding="utf-8")
    with psycopg.connect(postgres_url, autocommit=True) as sql:

        def steps() -> Steps:
            yield lambda seen: seen[0]["in"].status == "running"
            sql.execute(
                "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$"
            )
            sql.execute("CREATE TRIGGER full_disk BEFORE INSERT ON session_events EXECUTE FUNCTION full_disk()")
            for n in range(5):
                streams.append("full-in", [{"key": str(n)}, 17])
            until = time.monotonic() + 3.0
            yield lambda _: time.monotonic() > until
            assert count(postgres_url, "session_events")() == 0
            sql.execute("DROP TRIGGER full_disk ON session_events")
            yield lambda _: count(postgres_url, "session_events")() == 5

        assert play(file, steps(), server=server.url, postgres=postgres_url) == 0
    found = rows(postgres_url, "SELECT event_key FROM session_events ORDER BY id")
    assert [row[0] for row in found] == [str(n) for n in range(5)]
    assert rows(postgres_url, "SELECT DISTINCT reason, count(*) FROM headwater.dead_letters GROUP BY 1") == [
        ("not-an-object", 5)
    ]
