"""The pipeline by direction and number of streams: latency of single events after a warm-up, and throughput.

    python -m bench.directions [--streams 1,1000,10000] [--messages N] [--events N] [--warm-up N] [--only fold,…]
    python -m bench.directions --streams 10000 --add            keep the other figures of the file
    python -m bench.directions --page bench/directions.json     write the table of docs/benchmarks.md

Each direction first delivers the existing messages of its streams, which gives the throughput; then single events are
sent to the waiting query. Everything runs on this machine: our server in memory, Postgres, and Spark on `local[2]` with
our settings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psycopg

from bench.directions_page import write_table
from bench.servers import headwater
from bench.spark_latency import JSON, PAUSE_S, quantile
from bench.spark_session import spark_session
from headwater.pipeline.archive.job import Archive
from headwater.pipeline.fold.job import Fold
from headwater.pipeline.from_postgres import FromPostgres
from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.postgres_reader import FollowedTable
from headwater.pipeline.to_postgres import ToPostgres
from headwater.stack.database import LocalPostgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

RESULT = Path(__file__).with_name("directions.json")
PER_APPEND = 20_000
LOOK_S = 0.002
BULK_LOOK_S = 0.2
"""Rarely, because Spark's progress of thousands of streams is megabytes, and reading it takes CPU time."""
GIVE_UP_S = 1800.0
REGISTRY = {"DS_REGISTRY__ENABLED": "true"}


@dataclass(slots=True)
class RunContext:
    """The programs and the number of streams of a run."""

    spark: SparkSession
    http: httpx.Client
    sql: psycopg.Connection
    jobs: JobEnvironment
    directory: Path
    streams: int
    messages: int
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def url(self) -> str:
        return self.jobs.streams.removesuffix("/v1/stream")

    def fill(self, root: str) -> None:
        """Create the streams under a root, with all messages spread over them."""
        each = max(1, self.messages // self.streams)

        def fill_one(number: int) -> None:
            path = f"{self.url}{root}/{number:06}"
            for first in range(0, each, PER_APPEND):
                count = min(each, first + PER_APPEND) - first
                body = b"[" + b",".join([_MESSAGE] * count) + b"]"
                send = self.http.put if first == 0 else self.http.post
                send(path, content=body, headers=JSON).raise_for_status()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(fill_one, range(self.streams)))

    def any_stream(self) -> str:
        return f"{self.chance.randrange(self.streams):06}"

    def append(self, path: str, number: int) -> str:
        body = b'[{"type":"item","key":"event-%d","operation":"set","value":1}]' % number
        answer = self.http.post(self.url + path, content=body, headers=JSON).raise_for_status()
        return answer.headers["Stream-Next-Offset"]

    def tail(self, path: str) -> str:
        return self.http.head(self.url + path).raise_for_status().headers["Stream-Next-Offset"]

    def wait_for_message(self, path: str, after: str) -> None:
        params = {"offset": after, "live": "long-poll"}
        while self.http.get(self.url + path, params=params).raise_for_status().status_code != 200:
            pass


_MESSAGE = json.dumps({"type": "item", "key": "k", "operation": "set", "value": {"pad": "x" * 40}}).encode()


class Direction:
    """One query: how to start it, and how to send one event through it."""

    query: StreamingQuery
    first_messages: int

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.first_messages = max(1, context.messages // context.streams) * context.streams

    def start(self) -> None:
        raise NotImplementedError

    def one_event(self, number: int) -> Callable[[], None]:
        """Send an event; return a function that waits until its effect is visible."""
        raise NotImplementedError

    def delivered(self, seen: dict[int, int]) -> int:
        """Rows of committed batches; `seen` keeps the batches that Spark no longer reports."""
        progress: Any
        if self.query.exception() is not None:
            raise RuntimeError(str(self.query.exception()))
        for progress in self.query.recentProgress:
            seen[progress.batchId] = max(seen.get(progress.batchId, 0), progress.numInputRows)
        return sum(seen.values())


class ToStream(Direction):
    def start(self) -> None:
        context = self.context
        context.fill("/v1/stream/in")
        context.http.put(f"{context.jobs.streams}/out", headers=JSON).raise_for_status()
        self.query = (
            context.spark.readStream.format("headwater")
            .options(url=context.jobs.streams, prefix="in/")
            .load()
            .writeStream.format("headwater")
            .options(url=context.jobs.streams, stream="out", checkpointLocation=context.jobs.checkpoint("copy"))
            .trigger(processingTime="0 seconds")
            .start()
        )

    def one_event(self, number: int) -> Callable[[], None]:
        path = "/v1/stream/out"
        tail = self.context.tail(path)
        self.context.append(f"/v1/stream/in/{self.context.any_stream()}", number)
        return lambda: self.context.wait_for_message(path, tail)


class ToTable(Direction):
    def start(self) -> None:
        self.context.fill("/v1/stream/rows")
        self.query = ToPostgres(name="rows", prefix="rows/", table="arrived").start(
            self.context.spark, self.context.jobs
        )

    def one_event(self, number: int) -> Callable[[], None]:
        name = f"rows/{self.context.any_stream()}"
        offset = "_".join(self.context.append(f"/v1/stream/{name}", number).split("_")[:2])
        look = "SELECT 1 FROM arrived WHERE stream_name = %s AND ds_offset = %s"
        return lambda: _wait(lambda: self.context.sql.execute(look, [name, offset]).fetchone() is not None)


class FromTable(Direction):
    """Publish rows to one stream for each value of a column."""

    def start(self) -> None:
        context = self.context
        context.sql.execute("CREATE TABLE published_rows (id serial PRIMARY KEY, place int NOT NULL, pad text)")
        context.sql.execute(
            "INSERT INTO published_rows (place, pad) SELECT n %% %s, repeat('x', 40) FROM generate_series(0, %s) AS n",
            [context.streams, self.first_messages - 1],
        )
        tables = (FollowedTable("published_rows", "published_rows/{key}", "changes", key=("place",)),)
        self.query = FromPostgres(name="published_rows", tables=tables).start(context.spark, context.jobs)

    def one_event(self, number: int) -> Callable[[], None]:
        place = self.context.chance.randrange(self.context.streams)
        path = f"/v1/stream/published_rows/{place}"
        tail = self.context.tail(path)
        self.context.sql.execute("INSERT INTO published_rows (place) VALUES (%s)", [place])
        return lambda: self.context.wait_for_message(path, tail)


class Folded(Direction):
    def start(self) -> None:
        self.context.http.put(f"{self.context.url}/ds/folds").raise_for_status()
        self.context.fill("/ds/folds")
        self.query = Fold(bucket="folds").start(self.context.spark, self.context.jobs)

    def one_event(self, number: int) -> Callable[[], None]:
        path = f"/ds/folds/{self.context.any_stream()}"
        offset = self.context.append(path, number)

        def is_folded() -> bool:
            head = self.context.http.head(self.context.url + path).raise_for_status().headers
            return bool(head.get("Stream-Snapshot-Offset") == offset)

        return lambda: _wait(is_folded)


class Archived(Direction):
    """An event is visible when the table has a commit with it."""

    def start(self) -> None:
        context = self.context
        context.http.put(f"{context.url}/ds/lake").raise_for_status()
        context.fill("/ds/lake")
        archive = Archive(bucket="lake", lake=context.directory / "lake")
        self._table = archive.table()
        self.query = archive.start(context.spark, context.jobs)

    def one_event(self, number: int) -> Callable[[], None]:
        name = self.context.any_stream()
        offset = self.context.append(f"/ds/lake/{name}", number)
        return lambda: _wait(lambda: self._table.positions()[name].offset == offset)


DIRECTIONS: dict[str, type[Direction]] = {
    "stream to stream": ToStream,
    "stream to Postgres": ToTable,
    "Postgres to stream": FromTable,
    "fold": Folded,
    "archive": Archived,
}


def _wait(is_seen: Callable[[], bool], look_s: float = LOOK_S) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not is_seen():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not seen within {GIVE_UP_S:g} s")
        time.sleep(look_s)


def measure(direction: Direction, events: int, warm_up: int) -> dict[str, float]:
    direction.start()
    began = time.perf_counter()
    try:
        seen: dict[int, int] = {}
        _wait(lambda: direction.delivered(seen) >= direction.first_messages, BULK_LOOK_S)
        bulk_s = time.perf_counter() - began
        taken = []
        for number in range(warm_up + events):
            time.sleep(random.uniform(*PAUSE_S) if number >= warm_up else 0.0)
            began = time.perf_counter()
            direction.one_event(number)()
            taken.append((time.perf_counter() - began) * 1000)
    finally:
        direction.query.stop()
    single = taken[warm_up:]
    return {
        "per_second": round(direction.first_messages / bulk_s),
        "p50_ms": round(quantile(single, 0.5)),
        "p95_ms": round(quantile(single, 0.95)),
    }


def run(chosen: argparse.Namespace) -> None:
    """Measure what was chosen; the file is written after each figure, so that a run can be made in parts."""
    figures: dict[str, dict[str, Any]] = {name: {} for name in DIRECTIONS}
    if chosen.add and chosen.save.exists():
        figures |= json.loads(chosen.save.read_text())["figures"]
    with spark_session() as spark:
        for streams in map(int, chosen.streams.split(",")):
            for name in chosen.only.split(","):
                about = {
                    "taken": datetime.now(UTC).strftime("%Y-%m-%d"),
                    "load_average": round(os.getloadavg()[0], 1),
                    "messages": chosen.messages,
                    "events": chosen.events,
                    "warm_up": chosen.warm_up,
                }
                found = _measured(spark, name, streams, chosen.messages, chosen.events, chosen.warm_up)
                print(f"{name:20} {streams:>7,} streams: {found | about}", flush=True)
                figures[name][str(streams)] = found | about
                result = {"cores": os.cpu_count(), "figures": figures}
                chosen.save.write_text(json.dumps(result, indent=1) + "\n")


def _measured(spark: SparkSession, name: str, streams: int, messages: int, events: int, warm_up: int) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="directions-bench-"))
    directory.chmod(0o755)
    try:
        with (
            headwater(**REGISTRY) as server,
            LocalPostgres(directory / "pg", sync=False) as database,
            httpx.Client(timeout=120.0, limits=httpx.Limits(max_connections=16)) as http,
            psycopg.connect(database.url, autocommit=True) as sql,
        ):
            jobs = JobEnvironment(f"{server.url}/v1/stream", str(directory / "checkpoints"), postgres=database.url)
            context = RunContext(spark, http, sql, jobs, directory, streams, messages)
            return measure(DIRECTIONS[name](context), events, warm_up)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    finally:
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,1000,10000")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--only", default=",".join(DIRECTIONS), help="directions, separated by commas")
    parser.add_argument("--save", type=Path, default=RESULT)
    parser.add_argument("--add", action="store_true", help="keep the other figures of the file")
    parser.add_argument("--page", type=Path, help="write docs/benchmarks.md from this file, and measure nothing")
    chosen = parser.parse_args()
    if chosen.page is None:
        run(chosen)
    else:
        write_table(json.loads(chosen.page.read_text()))


if __name__ == "__main__":
    main()
