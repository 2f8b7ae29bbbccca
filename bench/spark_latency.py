"""Micro-batch latency: from the start of an append to the copy being visible in the target stream, one event at a time.

Our server and the official Node server in turns, after a warm-up, with the recommended settings. `single` events are
sent to a waiting query; `in a row` each is sent when the previous one is visible, and waits for that one's commit.

python -m bench.spark_latency [--events N] [--warm-up N] [--ours]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import httpx

from bench.servers import Running, headwater, official_node
from bench.spark_session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JSON = {"Content-Type": "application/json"}
PAUSE_S = (0.1, 0.3)
"""Pause between single events: random, and longer than a batch takes to end."""


class Copy:
    """A running query from stream `in` to stream `out` of a server, and a client that waits for `out`."""

    def __init__(self, spark: SparkSession, server: Running, checkpoint: str) -> None:
        self._http = httpx.Client(base_url=f"{server.url}/v1/stream", timeout=60.0)
        for name in ("in", "out"):
            self._http.put(f"/{name}", headers=JSON).raise_for_status()
        self._offset = self._http.head("/out").headers["Stream-Next-Offset"]
        self._sent = 0
        url = f"{server.url}/v1/stream"
        self.query = (
            spark.readStream.format("headwater")
            .options(url=url, streams="in")
            .load()
            .writeStream.format("headwater")
            .options(url=url, stream="out", checkpointLocation=checkpoint)
            .trigger(processingTime="0 seconds")
            .start()
        )

    def events(self, count: int, pause_s: tuple[float, float] = (0.0, 0.0)) -> list[float]:
        """The latency of each event in milliseconds."""
        taken = []
        for _ in range(count):
            time.sleep(random.uniform(*pause_s))
            taken.append(self._one_event() * 1000)
        return taken

    def _one_event(self) -> float:
        self._sent += 1
        n = self._sent
        began = time.perf_counter()
        self._http.post("/in", content=b'[{"n":%d}]' % n, headers=JSON).raise_for_status()
        while True:
            answer = self._http.get("/out", params={"offset": self._offset, "live": "long-poll"})
            answer.raise_for_status()
            self._offset = answer.headers["Stream-Next-Offset"]
            if answer.status_code == 200:
                break
        seconds = time.perf_counter() - began
        assert answer.json() == [{"n": n}], answer.text
        return seconds

    def phases(self) -> dict[str, float]:
        """The median time of each phase of a batch with data, in milliseconds."""
        spent: defaultdict[str, list[int]] = defaultdict(list)
        progress: Any
        for progress in self.query.recentProgress:
            if progress["numInputRows"]:
                for phase, milliseconds in progress["durationMs"].items():
                    spent[phase].append(milliseconds)
        return {phase: statistics.median(values) for phase, values in sorted(spent.items())}

    def stop(self) -> None:
        self.query.stop()
        self._http.close()


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def report(name: str, taken: list[float], phases: str) -> None:
    p50, p95 = quantile(taken, 0.5), quantile(taken, 0.95)
    print(f"{name:24}{p50:>6.0f} ms{p95:>6.0f} ms{max(taken):>6.0f} ms   {phases}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=150)
    parser.add_argument("--ours", action="store_true", help="leave out the official server")
    arguments = parser.parse_args()
    print(f"{'event to copy visible':24}{'p50':>9}{'p95':>9}{'max':>9}   of a batch, by phase in ms (median)")
    with headwater() as ours, official_node() as theirs, spark_session() as spark:
        for server in (ours,) if arguments.ours else (ours, theirs):
            with tempfile.TemporaryDirectory(prefix="spark-bench-") as checkpoint:
                copy = Copy(spark, server, checkpoint)
                try:
                    copy.events(arguments.warm_up)
                    single = copy.events(arguments.events, PAUSE_S)
                    phases = ", ".join(f"{phase} {spent:.0f}" for phase, spent in copy.phases().items())
                    report(f"{server.name}, single", single, phases)
                    report(f"{server.name}, in a row", copy.events(arguments.events), "")
                finally:
                    copy.stop()


if __name__ == "__main__":
    main()
