"""Fold many streams in one job, first from the beginning, then again for new messages; for growing amounts of data.

python -m bench.fold [--streams N] [--messages N] [--sizes N,N] [--every N]

`--messages` is per stream. Each size is a multiple of it; the last line is the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx

from bench.servers import headwater
from bench.spark_session import spark_session
from headwater.pipeline.fold.job import Fold
from headwater.pipeline.job import JobEnvironment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS = 20
WRITERS = 4


def message(n: int) -> dict[str, Any]:
    """About 110 bytes; one of five is a chunk."""
    if n % 5 == 0:
        return {"type": "chunk", "key": f"m{n % KEYS}", "operation": "append", "value": "x" * 12}
    return {"type": "message", "key": f"m{n % KEYS}", "operation": "set", "value": {"n": n, "text": "y" * 40}}


def fill(url: str, bucket: str, streams: int, first: int, count: int) -> None:
    body = json.dumps([message(n) for n in range(first, first + count)]).encode()
    headers = {"Content-Type": "application/json"}

    def share(number: int) -> None:
        with httpx.Client(base_url=f"{url}/ds/{bucket}", timeout=60.0) as http:
            for stream in range(number, streams, WRITERS):
                if not first:
                    http.put(f"/s{stream}", headers=headers).raise_for_status()
                http.post(f"/s{stream}", content=body, headers=headers).raise_for_status()

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(share, range(WRITERS)))


def run(spark: SparkSession, fold: Fold, environment: JobEnvironment) -> float:
    began = time.perf_counter()
    query = fold.start(spark, environment)
    query.awaitTermination()
    return time.perf_counter() - began


def check(url: str, bucket: str, streams: int) -> None:
    """Check that every stream has its snapshot at its tail; otherwise nothing is reported."""
    with httpx.Client(base_url=f"{url}/ds/{bucket}", timeout=60.0) as http:
        for stream in range(streams):
            head = http.head(f"/s{stream}").headers
            assert head["Stream-Snapshot-Offset"] == head["Stream-Next-Offset"], f"s{stream} is not folded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--messages", type=int, default=20)
    parser.add_argument("--sizes", default="1,10")
    chosen = parser.parse_args()
    results = []
    with spark_session() as spark, headwater() as server, tempfile.TemporaryDirectory(prefix="fold-bench-") as scratch:
        for number, size in enumerate([0, *map(int, chosen.sizes.split(","))]):
            # The first round is a warm-up of Spark and is not reported.
            bucket, messages = f"bench-{number}", chosen.messages * max(size, 1)
            streams = chosen.streams if size else 20
            httpx.put(f"{server.url}/ds/{bucket}").raise_for_status()
            fill(server.url, bucket, streams, 0, messages)
            environment = JobEnvironment(f"{server.url}/v1/stream", f"{scratch}/{bucket}")
            fold = Fold(bucket=bucket, once=True, batch_bytes=1 << 30)
            whole_s = run(spark, fold, environment)
            fill(server.url, bucket, streams, messages, max(1, messages // 10))
            more_s = run(spark, fold, environment)
            check(server.url, bucket, streams)
            if size:
                measured = {
                    "size": size,
                    "streams": streams,
                    "messages": streams * messages,
                    "seconds": round(whole_s, 1),
                }
                measured |= {
                    "per_second": round(streams * messages / whole_s),
                    "a_tenth_more_seconds": round(more_s, 1),
                }
                results.append(measured)
                print(measured)
    print(json.dumps({"bench": "fold", "results": results}))


if __name__ == "__main__":
    main()
