"""The cost of our server with growth: streams, bytes in a stream, idle readers, concurrent readers, a slow disk.

    python -m bench.scale                        about 4 minutes
    python -m bench.scale --full                 up to 1,000,000 streams and 1 GB: about 15 minutes

Each table is measured on separate servers, one after the other. Compare the CPU time per request, which depends least
on other load on the machine. The columns should be flat.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.serving import serve

from bench.servers import LOAD_CORE, SERVER_CORE, Running, on_core
from bench.workloads import (
    LARGE,
    SMALL,
    TEXT,
    Connection,
    Sample,
    allow_sockets,
    appends,
    connected,
    cpu_seconds,
    create_many,
    delivery,
    follow,
    repeat,
    request,
    resident_bytes,
    sample_of,
)

GROWTH = "More streams"
IDLE_READERS_TITLE = "Idle SSE readers"
MODES = ("memory", "file-durable")
STREAMS = (1, 100, 10_000, 100_000)
STREAMS_FULL = (*STREAMS, 1_000_000)
SIZES_MB = (1, 16, 128)
SIZES_MB_FULL = (*SIZES_MB, 1024)
IDLE_READERS = 10_000
TRIED_MAX = 20_000
"""How many of many streams are used in one measurement, chosen at random."""
ENOUGH_STREAMS = 10_000
"""With fewer, the memory of a stream cannot be told from that of everything else."""
PACE = 0.6
"""The rate of the writers in the mixed load, as a fraction of the highest rate."""

Rows = list[dict[str, Any]]
_SETTINGS: dict[str, Any] = {
    "DS_LIMITS__MAX_STREAM_BYTES": "0",
    "DS_LIMITS__MAX_MEMORY_BYTES": str(16 * 2**30),
    "DS_LIMITS__MAX_METADATA_BYTES": str(8 * 2**30),
    "DS_SERVER__MAX_CONNECTIONS": "20000",
}


@contextmanager
def server_on(mode: str, directory: Path, program: tuple[str, ...] = ("headwater",)) -> Iterator[Running]:
    with on_core(SERVER_CORE):
        starting = serve(directory=directory, program=program, DS_STORAGE__MODE=mode, **_SETTINGS)
        server = starting.__enter__()
    try:
        yield Running(mode, server.url, server.pid)
    finally:
        starting.__exit__(None, None, None)


def of_streams(mode: str, counts: tuple[int, ...], seconds: float) -> Rows:
    """Appends spread over all streams, reads and wake-ups, with a growing number of streams; then a start with all."""
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="headwater-scale-") as name:
        directory = Path(name)
        with server_on(mode, directory) as server, ExitStack() as opened:
            links = [opened.enter_context(connected(server)) for _ in range(32)]
            created = 0
            for count in counts:
                paths = [f"/v1/stream/s{number}" for number in range(created, count)]
                before_bytes, began_s = resident_bytes(server.pid), time.perf_counter()
                create_many(links, paths, TEXT)
                create_s, held = time.perf_counter() - began_s, resident_bytes(server.pid) - before_bytes
                row: dict[str, Any] = _costs(server, links, _some_of(count), seconds)
                row["create (us)"] = create_s / len(paths) * 1e6
                # Of the streams created since the last row, before anything is appended to them.
                row["bytes per idle stream"] = held / len(paths) if len(paths) >= ENOUGH_STREAMS else ""
                created = count
                rows.append({"storage": mode, "streams": count, **row})
        if mode != "memory":
            began_s = time.perf_counter()
            with server_on(mode, directory):
                rows[-1]["start (s)"] = time.perf_counter() - began_s
    return rows


def of_bytes(mode: str, sizes_mb: tuple[int, ...], seconds: float) -> Rows:
    """The same for one growing stream."""
    rows: Rows = []
    path = "/v1/stream/growing"
    with (
        tempfile.TemporaryDirectory(prefix="headwater-scale-") as name,
        server_on(mode, Path(name)) as server,
        ExitStack() as opened,
    ):
        links = [opened.enter_context(connected(server)) for _ in range(32)]
        links[0].create(path, TEXT)
        large = request("POST", path, TEXT, LARGE)
        written = 0
        for size_mb in sizes_mb:
            while written < size_mb:
                links[0].send(large)
                links[0].answer()
                written += 1
            rows.append({"storage": mode, "MB in the stream": size_mb, **_costs(server, links, [path], seconds)})
    return rows


def _costs(server: Running, links: list[Connection], paths: list[str], seconds: float) -> dict[str, float]:
    appended = repeat(
        server, links, [request("POST", path, TEXT, SMALL) for path in paths], lambda link: bool(link.answer()), seconds
    )
    reads = [f"GET {path}?offset=now HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths]
    read = repeat(server, links, reads, Connection.body, seconds)
    woken = delivery("long-poll")(server, f"/v1/stream/woken-{random.getrandbits(40)}", seconds)
    return {
        "append CPU (us)": appended.cpu_us,
        "append p99 (us)": appended.p99_us,
        "read CPU (us)": read.cpu_us,
        "wake-up p50 (us)": woken.p50_us,
    }


def _some_of(count: int) -> list[str]:
    chosen = range(count) if count <= TRIED_MAX else random.Random(1).sample(range(count), TRIED_MAX)
    return [f"/v1/stream/s{number}" for number in chosen]


def idle_readers(count: int) -> Rows:
    """Many waiting SSE readers, and concurrent appends to another stream."""
    allow_sockets(count)
    with (
        tempfile.TemporaryDirectory(prefix="headwater-scale-") as name,
        server_on("memory", Path(name)) as server,
        ExitStack() as opened,
    ):
        writer = opened.enter_context(connected(server))
        writer.create("/v1/stream/quiet", TEXT)
        before = resident_bytes(server.pid)
        follow(server, ["/v1/stream/quiet"] * count, opened)
        held = resident_bytes(server.pid) - before
        cpu_s, began_s = cpu_seconds(server.pid), time.perf_counter()
        time.sleep(3)
        idle = (cpu_seconds(server.pid) - cpu_s) / (time.perf_counter() - began_s)
        appended = appends(32)(server, "/v1/stream/busy", 1.0)
        return [
            {
                "readers": count,
                "bytes per reader": held / count,
                "CPU while idle (%)": idle * 100,
                "append CPU (us)": appended.cpu_us,
                "append p99 (us)": appended.p99_us,
            }
        ]


def slow_disk(seconds: float) -> Rows:
    """Group commit on a disk whose syncs take 5 ms longer: the rate must grow with the number of connections."""
    rows: Rows = []
    with (
        tempfile.TemporaryDirectory(prefix="headwater-scale-") as name,
        server_on("file-durable", Path(name), ("bench.slow_disk",)) as server,
    ):
        for connections in (1, 8, 32, 128):
            found = appends(connections)(server, f"/v1/stream/slow-{connections}", seconds)
            rows.append({"connections": connections, "appends/s": found.per_second, "p99 (us)": found.p99_us})
    return rows


def mixed(mode: str, seconds: float) -> Rows:
    """Writers at a fraction of the highest rate, with readers that read a stream as fast as possible, or paced."""
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="headwater-scale-") as name, server_on(mode, Path(name)) as server:
        with connected(server) as link:
            link.create("/v1/stream/old", TEXT)
            for _ in range(8):
                link.send(request("POST", "/v1/stream/old", TEXT, LARGE))
                link.answer()
        ceiling = appends(32)(server, "/v1/stream/ceiling", seconds).per_second
        for readers, pause_s in ((0, 0.0), (8, 0.05), (8, 0.0)):
            with _readers(server, readers, pause_s):
                due, sent = _paced(server, f"/v1/stream/m{readers}-{pause_s}", ceiling * PACE, seconds)
            pace = "-" if not readers else "paced" if pause_s else "unpaced"
            rows.append(
                {
                    "storage": mode,
                    "readers": readers,
                    "pace": pace,
                    "wanted appends/s": ceiling * PACE,
                    "appends/s": sent.per_second,
                    "p50 (us)": sent.p50_us,
                    "p99 (us)": sent.p99_us,
                    "p99 from when due (us)": due.p99_us,
                    "server's CPU (%)": sent.cpu_us * sent.per_second / 1e4,
                }
            )
    return rows


def _paced(server: Running, path: str, per_second: float, seconds: float) -> tuple[Sample, Sample]:
    """Appends at this rate, if the server keeps up; times from when they were due, and from when they were sent."""
    late_s: list[float] = []
    took_s: list[float] = []
    with ExitStack() as opened:
        links = [opened.enter_context(connected(server)) for _ in range(32)]
        links[0].create(path, TEXT)
        message = request("POST", path, TEXT, SMALL)
        every_s = len(links) / per_second
        cpu_before_s, began_s = cpu_seconds(server.pid), time.perf_counter()
        due_s = began_s
        while (now_s := time.perf_counter()) - began_s < seconds:
            if now_s < due_s:
                time.sleep(due_s - now_s)
            sent_s = time.perf_counter()
            for link in links:
                link.send(message)
            for link in links:
                link.answer()
                now_s = time.perf_counter()
                # Measured from the scheduled time, so that a server that falls behind cannot hide it.
                late_s.append(now_s - due_s)
                took_s.append(now_s - sent_s)
            due_s += every_s
        elapsed_s = time.perf_counter() - began_s
    rate, cpu_s = len(took_s) / elapsed_s, cpu_seconds(server.pid) - cpu_before_s
    return sample_of(rate, late_s, cpu_s), sample_of(rate, took_s, cpu_s)


@contextmanager
def _readers(server: Running, count: int, pause_s: float) -> Iterator[None]:
    """Processes that repeatedly read a stream of 8 MiB from its beginning."""
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=read_again, args=(server, pause_s), daemon=True) for _ in range(min(count, 2))]
    for child in children:
        child.start()
    try:
        yield
        if any(child.exitcode is not None for child in children):
            raise SystemExit("a process of readers ended early")
    finally:
        for child in children:
            child.terminate()
            child.join()


def read_again(server: Running, pause_s: float) -> None:
    os.nice(19)  # The writer runs on the same core, and must not wait for the readers.
    read = b"GET /v1/stream/old?offset=-1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ExitStack() as opened:
        links = [opened.enter_context(connected(server)) for _ in range(4)]
        while True:
            for link in links:
                link.send(read)
            for link in links:
                link.body()
            time.sleep(pause_s)


def replay(size_mb: int) -> Rows:
    """Read a whole stream from its beginning, first with a cold page cache, then again."""
    rows: Rows = []
    for mode in ("file-durable", "acid"):
        with tempfile.TemporaryDirectory(prefix="headwater-scale-") as name:
            directory = Path(name)
            with server_on(mode, directory) as server, connected(server) as link:
                link.create("/v1/stream/long", TEXT)
                for _ in range(size_mb):
                    link.send(request("POST", "/v1/stream/long", TEXT, LARGE))
                    link.answer()
            with server_on(mode, directory) as server:
                forget_files(directory)
                for state in ("cold", "warm"):
                    row = {"storage": mode, "MB": size_mb, "files": state, **_read_whole(server, "/v1/stream/long")}
                    rows.append(row)
    return rows


def _read_whole(server: Running, path: str) -> dict[str, float]:
    received, offset = 0, "-1"
    with connected(server) as link:
        cpu_s, began_s = cpu_seconds(server.pid), time.perf_counter()
        while True:
            link.send(f"GET {path}?offset={offset} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head, size = link.head_and_body()
            received += size
            offset = head.partition(b"stream-next-offset: ")[2].split(b"\r\n")[0].decode()
            if b"stream-up-to-date: true" in head:
                break
        elapsed_s = time.perf_counter() - began_s
    cpu_s = cpu_seconds(server.pid) - cpu_s
    return {
        "MB/s": received / elapsed_s / 1e6,
        "CPU (ms per MB)": cpu_s / (received / 1e6) * 1e3,
        "memory (MB)": resident_bytes(server.pid) / 1e6,
    }


def forget_files(directory: Path) -> None:
    """Drop files from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def run(*, full: bool, seconds: float = 0.5) -> dict[str, Rows]:
    with on_core(LOAD_CORE):
        return {
            GROWTH: [row for mode in MODES for row in of_streams(mode, STREAMS_FULL if full else STREAMS, seconds)],
            "More bytes in a stream": [
                row for mode in MODES for row in of_bytes(mode, SIZES_MB_FULL if full else SIZES_MB, seconds)
            ],
            IDLE_READERS_TITLE: idle_readers(IDLE_READERS),
            "Writers beside readers": [row for mode in MODES for row in mixed(mode, 2 * seconds)],
            "A slow disk (5 ms more for each sync)": slow_disk(seconds),
            "Replay of a long stream": replay(1024 if full else 256),
        }


def print_tables(tables: dict[str, Rows]) -> None:
    for title, rows in tables.items():
        print(f"\n{title}")
        for row in rows:
            print("  " + ", ".join(f"{name} {spell(value)}" for name, value in row.items()))


def spell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.2f}" if value < 10 and value != int(value) else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="up to 1,000,000 streams and 1 GB")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one measurement")
    chosen = parser.parse_args()
    tables = run(full=chosen.full, seconds=chosen.seconds)
    print_tables(tables)
    print(json.dumps({"benchmark": "scale", "tables": tables}))


if __name__ == "__main__":
    main()
