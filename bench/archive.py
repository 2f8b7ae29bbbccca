"""Archive messages, compact the archive, and count its rows with Spark, for growing amounts of data.

python -m bench.archive [--messages N] [--streams N] [--sizes N,N]

The full size is `--messages 1000000 --sizes 1,10`: ten million messages of about 100 bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from bench.servers import headwater
from bench.spark_read import message
from bench.spark_session import spark_session
from headwater.pipeline.archive.job import Archive
from headwater.pipeline.archive.reading import read_archive
from headwater.pipeline.archive.table import ArchiveTable
from headwater.pipeline.job import JobEnvironment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PER_APPEND = 10_000


def fill(url: str, bucket: str, streams: int, count: int) -> None:
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=f"{url}/ds/{bucket}", timeout=120.0) as http:
        for stream in range(streams):
            http.put(f"/s{stream}", headers=headers).raise_for_status()
        for number, start in enumerate(range(0, count, PER_APPEND)):
            body = b"[" + b",".join(message(n) for n in range(start, min(start + PER_APPEND, count))) + b"]"
            http.post(f"/s{number % streams}", content=body, headers=headers).raise_for_status()


def measure(
    spark: SparkSession, url: str, scratch: Path, bucket: str, count: int, chosen: argparse.Namespace
) -> dict[str, float]:
    httpx.put(f"{url}/ds/{bucket}").raise_for_status()
    fill(url, bucket, chosen.streams, count)
    lake = scratch / bucket
    archive = Archive(lake=lake, bucket=bucket, once=True)
    began = time.perf_counter()
    archive.start(spark, JobEnvironment(f"{url}/v1/stream", str(scratch / "places" / bucket))).awaitTermination()
    archived_s = time.perf_counter() - began
    table = ArchiveTable(lake)
    before = len(table.files())
    began = time.perf_counter()
    table.compact()
    compacted_s = time.perf_counter() - began
    began = time.perf_counter()
    rows = read_archive(spark, lake).selectExpr("count(*)", "count(distinct stream, position)").collect()[0]
    counted_s = time.perf_counter() - began
    assert tuple(rows) == (count, count), f"{tuple(rows)} rows of {count}"
    return {
        "messages": count,
        "seconds": round(archived_s, 1),
        "per_second": round(count / archived_s),
        "files": before,
        "compacted_files": len(table.files()),
        "compact_seconds": round(compacted_s, 1),
        "count_seconds": round(counted_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--sizes", default="1,10")
    chosen = parser.parse_args()
    results = []
    with (
        spark_session() as spark,
        headwater() as server,
        tempfile.TemporaryDirectory(prefix="archive-bench-") as scratch,
    ):
        measure(spark, server.url, Path(scratch), "warm-up", 10_000, chosen)
        for size in map(int, chosen.sizes.split(",")):
            measured = measure(spark, server.url, Path(scratch), f"bench-{size}", chosen.messages * size, chosen)
            results.append({"size": size, **measured})
            print(results[-1])
    print(json.dumps({"bench": "archive", "results": results}))


if __name__ == "__main__":
    main()
