"""A query over many streams, without Spark: CPU time while idle, time to notice a message, size of an offset.

The source is driven as Spark drives it: `latestOffset` in a loop, offsets as JSON text.

python -m bench.spark_many_streams [--streams N] [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from pyspark.sql.streaming.datasource import ReadAllAvailable

from bench.servers import headwater
from headwater.spark.options import source_options
from headwater.spark.source import HeadwaterSource
from headwater.spark.stream_reader import MicroBatchReader

JSON = {"Content-Type": "application/json"}
NOTICES = 30


def fill(url: str, count: int) -> None:
    """Create streams with one message each."""
    with httpx.Client(base_url=url) as http, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: http.put(f"/many/{n:06}", headers=JSON, content=b"[0]"), range(count)))


def look(reader: MicroBatchReader, place: dict[str, Any]) -> dict[str, Any]:
    return reader.latestOffset(json.loads(json.dumps(place)), ReadAllAvailable())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    with headwater() as server, httpx.Client() as http:
        url = f"{server.url}/v1/stream"
        fill(url, arguments.streams)
        given = {"url": url, "prefix": "many/"}
        reader = MicroBatchReader(source_options(given), HeadwaterSource(given).schema())
        began = time.perf_counter()
        place = look(reader, reader.initialOffset())
        reader.partitions(reader.initialOffset(), place)
        print(f"first plan: {time.perf_counter() - began:.2f} s; offset: {len(json.dumps(place)):,} bytes")
        used, until = time.process_time(), time.monotonic() + arguments.seconds
        looks = 0
        while time.monotonic() < until:
            place = look(reader, place)
            looks += 1
        print(f"idle: {(time.process_time() - used) / arguments.seconds:.1%} of a core, {looks} calls")
        noticed = []
        for n in range(NOTICES):
            sent: list[float] = []

            def send(name: str = f"{url}/many/{n * 7:06}", sent: list[float] = sent) -> None:
                time.sleep(0.1)
                sent.append(time.perf_counter())
                http.post(name, headers=JSON, content=b"[1]")

            sender = threading.Thread(target=send)
            sender.start()
            before = place
            while place == before:
                place = look(reader, place)
            noticed.append((time.perf_counter() - sent[0]) * 1000)
            reader.partitions(before, place)
            sender.join()
        print(f"noticed after {statistics.median(noticed):.0f} ms in the median, {max(noticed):.0f} ms at most")
        reader.stop()


if __name__ == "__main__":
    main()
