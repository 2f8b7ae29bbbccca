"""Postgres both ways through Spark: single events, warm, from write to visible; and throughput of many.

python -m bench.pipeline_postgres [--events N] [--warm-up N] [--rows N]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psycopg

from bench.servers import headwater
from bench.spark_latency import PAUSE_S, quantile
from bench.spark_session import spark_session
from headwater.pipeline.from_postgres import FromPostgres
from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.postgres_reader import FollowedTable
from headwater.pipeline.to_postgres import ToPostgres
from headwater.stack.database import LocalPostgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JSON = {"Content-Type": "application/json"}
PER_APPEND = 20_000


def pause(wanted: bool) -> None:
    """A single event meets a query that waits, not one that still commits the event before."""
    if wanted:
        time.sleep(random.uniform(*PAUSE_S))


def report(name: str, seconds: list[float]) -> None:
    p50, p95 = quantile(seconds, 0.5) * 1000, quantile(seconds, 0.95) * 1000
    print(f"{name}: p50 {p50:.0f} ms, p95 {p95:.0f} ms ({len(seconds)} events)", flush=True)


def into_table(spark: SparkSession, around: JobEnvironment, events: int, warm_up: int) -> None:
    query = ToPostgres(name="latency-in", streams=("latency-in",)).start(spark, around)
    times: list[float] = []
    with httpx.Client(timeout=60.0) as http, psycopg.connect(around.postgres, autocommit=True) as sql:
        for number in range(warm_up + events):
            pause(number >= warm_up)
            began = time.perf_counter()
            http.post(f"{around.streams}/latency-in", content=b'[{"key":"%d"}]' % number, headers=JSON)
            look = "SELECT 1 FROM session_events WHERE stream_name = 'latency-in' AND event_key = %s"
            while not sql.execute(look, [str(number)]).fetchone():
                time.sleep(0.002)
            times.append(time.perf_counter() - began)
    query.stop()
    report("stream -> table", times[warm_up:])


def into_stream(spark: SparkSession, around: JobEnvironment, events: int, warm_up: int) -> None:
    with psycopg.connect(around.postgres, autocommit=True) as sql, httpx.Client(timeout=60.0) as http:
        sql.execute("CREATE TABLE latency_out (id int PRIMARY KEY)")
        tables = (FollowedTable("latency_out", "latency-out", "rows", operations=("insert",)),)
        query = FromPostgres(name="latency-out", tables=tables, slot="latency_out", publication="latency_out").start(
            spark, around
        )
        url = f"{around.streams}/latency-out"
        offset = http.head(url).headers["Stream-Next-Offset"]
        times: list[float] = []
        for number in range(warm_up + events):
            pause(number >= warm_up)
            began = time.perf_counter()
            sql.execute("INSERT INTO latency_out VALUES (%s)", [number])
            while True:
                answer = http.get(url, params={"offset": offset, "live": "long-poll"})
                offset = answer.headers["Stream-Next-Offset"]
                if answer.status_code == 200:
                    break
            times.append(time.perf_counter() - began)
        query.stop()
    report("table -> stream", times[warm_up:])


def many_into_table(spark: SparkSession, around: JobEnvironment, rows: int) -> None:
    url = f"{around.streams}/many-in"
    with httpx.Client(timeout=120.0) as http:
        http.put(url, headers=JSON)
        for first in range(0, rows, PER_APPEND):
            last = min(rows, first + PER_APPEND)
            body = json.dumps(
                [{"key": str(n), "type": "bench", "operation": "set", "value": {"n": n}} for n in range(first, last)]
            )
            http.post(url, content=body, headers=JSON).raise_for_status()
        tail = http.head(url).headers["Stream-Next-Offset"]
    with psycopg.connect(around.postgres, autocommit=True) as sql:
        # By the key, so that looking costs the database nothing.
        seen = "SELECT 1 FROM session_events WHERE stream_name = 'many-in' AND ds_offset = %s"
        begun = time.perf_counter()
        query = ToPostgres(name="many-in", streams=("many-in",)).start(spark, around)
        while not (there(sql, "SELECT to_regclass('session_events')") and there(sql, seen, tail)):
            time.sleep(0.1)
        tell("stream -> table", rows, time.perf_counter() - begun)
        found = sql.execute("SELECT count(*) FROM session_events WHERE stream_name = 'many-in'").fetchone()
        assert found == (rows,), found
    query.stop()


def many_into_stream(spark: SparkSession, around: JobEnvironment, rows: int) -> None:
    tables = (FollowedTable("many_out", "many-out", "changes"),)
    with psycopg.connect(around.postgres, autocommit=True) as sql, httpx.Client(timeout=60.0) as http:
        sql.execute("CREATE TABLE many_out (id int PRIMARY KEY, title text, body text)")
        query = FromPostgres(name="many-out", tables=tables, slot="many_out", publication="many_out").start(
            spark, around
        )
        while not sql.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = 'many_out'").fetchone():
            time.sleep(0.1)
        time.sleep(3.0)
        begun = time.perf_counter()
        for first in range(0, rows, PER_APPEND):
            sql.execute(
                "INSERT INTO many_out SELECT n, 'title ' || n, repeat('x', 60) FROM generate_series(%s::int, %s) AS n",
                [first + 1, min(rows, first + PER_APPEND)],
            )
        written = time.perf_counter() - begun

        def told() -> int:
            return int(http.head(f"{around.streams}/many-out").headers["Stream-Next-Position"])

        while told() < rows:
            time.sleep(0.1)
        tell(f"table -> stream (of which writing the table took {written:.1f} s)", rows, time.perf_counter() - begun)
        query.stop()


def there(sql: psycopg.Connection, query: str, *parameters: str) -> bool:
    found = sql.execute(query, parameters).fetchone()
    return found is not None and found[0] is not None


def tell(name: str, rows: int, seconds: float) -> None:
    print(f"{name}: {rows} in {seconds:.1f} s, {rows / seconds:.0f} a second", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--rows", type=int, default=1_000_000)
    chosen = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="pipeline-bench-"))
    directory.chmod(0o755)
    try:
        with headwater() as server, LocalPostgres(directory / "pg", sync=False) as database, spark_session() as spark:
            around = JobEnvironment(f"{server.url}/v1/stream", str(directory / "checkpoints"), postgres=database.url)
            if chosen.events:
                into_table(spark, around, chosen.events, chosen.warm_up)
                into_stream(spark, around, chosen.events, chosen.warm_up)
            if chosen.rows:
                many_into_table(spark, around, chosen.rows)
                many_into_stream(spark, around, chosen.rows)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
