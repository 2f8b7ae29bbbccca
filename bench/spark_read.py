"""Spark throughput: a million small JSON messages to Parquet, and a million rows written to a hundred streams.

Our server and the official Node server in turns, in one run; then a breakdown of the time.

python -m bench.spark_read [--messages N] [--rounds N]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from bench.servers import Running, headwater, official_node
from bench.spark_session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STREAM = "bench"
RAW = "value string"
EVERYTHING = "stream string, offset string, position long, value string, content_type string, snapshot boolean"
TYPED = "id long, kind string, amount double, note string, ok boolean"
TARGETS = 100
PER_APPEND = 10_000


def message(n: int) -> bytes:
    """About 100 bytes."""
    return b'{"id":%d,"kind":"k%d","amount":%.1f,"note":"%s","ok":true}' % (n, n % 7, n * 0.5, b"x" * 42)


def fill(server: Running, count: int) -> int:
    size = 0
    with httpx.Client(base_url=f"{server.url}/v1/stream", timeout=120.0) as http:
        http.put(f"/{STREAM}", headers={"Content-Type": "application/json"}).raise_for_status()
        for start in range(0, count, PER_APPEND):
            body = b"[" + b",".join(message(n) for n in range(start, min(start + PER_APPEND, count))) + b"]"
            size += len(body)
            http.post(f"/{STREAM}", content=body, headers={"Content-Type": "application/json"}).raise_for_status()
    return size


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Jobs:
    """The same Spark jobs for both servers."""

    def __init__(self, spark: SparkSession, scratch: Path) -> None:
        self._spark = spark
        self._scratch = scratch

    def frame(self, server: Running, schema: str) -> DataFrame:
        reader = self._spark.read.format("headwater").option("url", f"{server.url}/v1/stream").option("streams", STREAM)
        return reader.schema(schema).load()

    def parquet(self, server: Running, schema: str) -> float:
        target = self._scratch / "parquet"
        seconds = timed(lambda: self.frame(server, schema).write.mode("overwrite").parquet(str(target)))
        self.rows = self._spark.read.parquet(str(target)).count()
        shutil.rmtree(target)
        return seconds

    def to_nowhere(self, server: Running, schema: str) -> float:
        return timed(lambda: self.frame(server, schema).write.format("noop").mode("overwrite").save())

    def write_many(self, server: Running, count: int, run: int) -> float:
        from pyspark.sql import functions as F

        from headwater.spark import by_target

        rows = self._spark.range(0, count, 1, 2).select(
            F.format_string("out-%d/%02d", F.lit(run), F.col("id") % TARGETS).alias("stream"),
            "id",
            F.format_string('{"id":%d,"pad":"%s"}', F.col("id"), F.lit("x" * 80)).alias("value"),
        )
        arranged = by_target(rows, partitions=4)
        sink = arranged.write.format("headwater").option("url", f"{server.url}/v1/stream")
        return timed(lambda: sink.options(createMissing="true", orderBy="id").mode("append").save())


def shares(server: Running, count: int) -> Iterator[tuple[str, float]]:
    """The parts of a read, measured separately, without Spark: one process, one connection."""
    from pyspark.sql.types import StructType

    from headwater.spark.arrow import Layout
    from headwater.spark.message_runs import from_frames, is_json
    from headwater.spark.offsets import BEGINNING
    from headwater.spark.options import ConnectionOptions
    from headwater.spark.planner import tail_of
    from headwater.spark.protocol import StreamsClient

    client = StreamsClient(ConnectionOptions(f"{server.url}/v1/stream"))
    end = tail_of(client.head(STREAM)).offset
    chunks = []

    def fetch() -> None:
        offset = BEGINNING
        while offset != end:
            chunk, _ = client.frames(STREAM, offset, end)
            assert is_json(chunk.content_type)
            chunks.append((offset, chunk))
            offset = chunk.next_offset

    yield "server and HTTP, one connection", timed(fetch)
    runs = [from_frames(STREAM, chunk.content_type, chunk.body, offset) for offset, chunk in chunks]
    assert sum(map(len, runs)) == count
    for name, ddl in (("only value", RAW), ("all columns", EVERYTHING), ("typed", TYPED)):
        schema = StructType.fromDDL(ddl)
        assert isinstance(schema, StructType)
        layout = Layout(schema, "", "fail")
        yield f"bytes to Arrow, {name}", timed(lambda layout=layout: [layout.batch(run) for run in runs])  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    count = arguments.messages
    with (
        tempfile.TemporaryDirectory(prefix="spark-bench-") as scratch,
        headwater() as ours,
        official_node(arguments=("--no-compression",)) as theirs,
        spark_session() as spark,
    ):
        size = fill(ours, count)
        fill(theirs, count)
        print(f"{count:,} messages, {size / count:.0f} bytes each, in one stream of each server; Spark local[2]\n")
        jobs = Jobs(spark, Path(scratch))
        for server in (ours, theirs):
            # The first job of each kind includes the start of workers and compilation.
            jobs.parquet(server, RAW)
            jobs.parquet(server, TYPED)
        print(f"{'to Parquet':28}{'ours':>10}{'Node':>10}{'ratio':>8}")
        for name, schema in (("value only", RAW), ("all six columns", EVERYTHING), ("typed columns", TYPED)):
            pairs = []
            for _ in range(arguments.rounds):
                mine, other = jobs.parquet(ours, schema), jobs.parquet(theirs, schema)
                assert jobs.rows == count
                pairs.append((mine, other))
            mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(other / mine for mine, other in pairs)
            print(f"{name:28}{count / mine:>8,.0f}/s{count / other:>8,.0f}/s{ratio:>7.1f}x")
        print("\nbreakdown of the time (ours)")
        parts = list(shares(ours, count))
        for name, schema in (("value only", RAW), ("typed columns", TYPED)):
            parts.append((f"Spark without Parquet, {name}", jobs.to_nowhere(ours, schema)))
            parts.append((f"Spark with Parquet, {name}", jobs.parquet(ours, schema)))
        for name, seconds in parts:
            print(f"  {name:42}{seconds:8.2f} s{count / seconds:>14,.0f}/s")
        jobs.write_many(ours, count // 10, 0)
        wrote = [jobs.write_many(ours, count, run + 1) for run in range(arguments.rounds)]
        seconds = statistics.median(wrote)
        print(f"\n{count:,} rows to {TARGETS} streams of ours: {seconds:.2f} s, {count / seconds:,.0f} rows/s")


if __name__ == "__main__":
    main()
