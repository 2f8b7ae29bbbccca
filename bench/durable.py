"""The cost of durability: appends, replay and many streams, each compared within one run.

    python -m bench.durable                      everything, at sizes that take a few minutes
    python -m bench.durable replay --mebibytes 1024
    python -m bench.durable streams --count 100000

| part    | measures                                                                                         |
|---------|--------------------------------------------------------------------------------------------------|
| node    | appends per second, `file-durable` against the official Node server's files, 32 connections      |
| modes   | appends per second, `file-durable` and `acid` against our own `memory`, 128 connections          |
| replay  | MB/s of reading a large stream from its beginning, against the Node server; our peak memory      |
| streams | seconds to boot with many streams, and bytes of memory for an idle one                           |

Invariant: only ratios of alternating rounds on the same core are reported as results; absolute numbers depend on the
machine and its other load.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tests.serving import serve

from bench.append import Load, Round, body_of, run_round
from bench.servers import LOAD_CORE, SERVER_CORE, Running, cpu_seconds, headwater, official_node, on_core

MIB = 2**20
PARTS = ("node", "modes", "replay", "streams")
UNLIMITED: dict[str, Any] = {"DS_LIMITS__MAX_STREAM_BYTES": "0"}


# -- appends -----------------------------------------------------------------------------------------------------------


def in_turns(servers: list[Running], load: Load, rounds: int) -> dict[str, list[Round]]:
    for server in servers:
        run_round(server, replace(load, seconds=1), 0)
    results: dict[str, list[Round]] = {server.name: [] for server in servers}
    for number in range(1, rounds + 1):
        for server in servers:
            results[server.name].append(run_round(server, load, number))
    return results


def ratio(results: dict[str, list[Round]], ours: str, theirs: str) -> float:
    """The median ratio over pairs of consecutive rounds, which had the same conditions."""
    pairs = zip(results[ours], results[theirs], strict=True)
    return statistics.median(one.appends_per_sec / other.appends_per_sec for one, other in pairs)


def show(results: dict[str, list[Round]]) -> None:
    for name, rounds in results.items():
        print(
            f"  {name:<16}{statistics.median(one.appends_per_sec for one in rounds):>9.0f} appends/s"
            f"   p50 {statistics.median(one.p50_ms for one in rounds):7.2f} ms"
            f"   p99 {statistics.median(one.p99_ms for one in rounds):7.2f} ms"
        )


def appends_against_node(seconds: int, rounds: int, streams: int) -> dict[str, Any]:
    load = Load(32, streams, seconds, body_of(100, json_mode=False), "text/plain")
    with headwater("file-durable") as ours, official_node("file") as theirs:
        results = in_turns([replace(ours, name="file-durable"), theirs], load, rounds)
    found = ratio(results, "file-durable", "official node")
    print(f"appends of 100 bytes, 32 connections, {streams} stream(s)")
    show(results)
    print(f"  file-durable / official node's files: {found:.1f} (wanted: 15)")
    return {"connections": 32, "streams": streams, "ratio": found}


def appends_by_mode(seconds: int, rounds: int, streams: int) -> dict[str, Any]:
    load = Load(128, streams, seconds, body_of(100, json_mode=False), "text/plain")
    modes = ("memory", "file-fast", "file-durable", "acid")
    with ExitStack() as running:
        servers = [replace(running.enter_context(headwater(mode)), name=mode) for mode in modes]
        results = in_turns(servers, load, rounds)
    durable, acid = ratio(results, "file-durable", "memory"), ratio(results, "acid", "file-durable")
    print(f"appends of 100 bytes, 128 connections, {streams} stream(s)")
    show(results)
    print(f"  file-durable / memory: {durable:.2f} (wanted: 0.5)   acid / file-durable: {acid:.2f} (wanted: 0.5)")
    return {"connections": 128, "streams": streams, "durable_of_memory": durable, "acid_of_durable": acid}


# -- replay ------------------------------------------------------------------------------------------------------------


class Memory:
    """The peak memory of a process, sampled occasionally: its own memory, and its mapped files."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/status")
        self.own_bytes = self.mapped_bytes = 0

    def look(self) -> None:
        own, mapped = memory_of(self._path)
        self.own_bytes, self.mapped_bytes = max(self.own_bytes, own), max(self.mapped_bytes, mapped)


def memory_of(status: Path) -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def fill(server: Running, path: str, mebibytes: int, message_bytes: int) -> None:
    body = bytes(range(256)) * (message_bytes // 256)
    with httpx.Client(base_url=server.url, timeout=120) as http:
        http.put(path, headers={"Content-Type": "application/octet-stream"}).raise_for_status()
        for _ in range(mebibytes * MIB // len(body)):
            http.post(path, headers={"Content-Type": "application/octet-stream"}, content=body).raise_for_status()


def read_through(server: Running, path: str, memory: Memory | None) -> tuple[int, float]:
    """Bytes and seconds of one catch-up from the beginning, chunk by chunk, as a reader does it."""
    total, offset = 0, "-1"
    started = time.perf_counter()
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        while True:
            connection.sendall(f"GET {path}?offset={offset} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            headers, size = _answer(connection)
            total += size
            if memory is not None:
                memory.look()
            offset = headers["stream-next-offset"]
            if headers.get("stream-up-to-date") == "true":
                return total, time.perf_counter() - started


def _answer(connection: socket.socket) -> tuple[dict[str, str], int]:
    """Read one response and discard its body; return its headers and the size of the body."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        more = connection.recv(4096)
        assert more, "the server hung up"
        raw += more
    head, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    assert " 200 " in status, status
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "content-length" in headers:
        size = int(headers["content-length"])
        _discard(connection, size - len(rest))
        return headers, size
    return headers, _chunked(connection, rest)


def _chunked(connection: socket.socket, rest: bytes) -> int:
    total = 0
    while True:
        while b"\r\n" not in rest:
            rest += connection.recv(4096)
        line, _, rest = rest.partition(b"\r\n")
        size = int(line, 16)
        _discard(connection, size + 2 - len(rest))
        rest = rest[size + 2 :]
        if not size:
            return total
        total += size


_NOWHERE = bytearray(4 * MIB)


def _discard(connection: socket.socket, left: int) -> None:
    """Let the kernel discard data without copying it, so that the reader costs little CPU time."""
    while left > 0:
        got = connection.recv_into(_NOWHERE, min(left, len(_NOWHERE)), socket.MSG_TRUNC)
        assert got, "the server hung up"
        left -= got


def replay(mebibytes: int, message_bytes: int, rounds: int) -> dict[str, Any]:
    path = "/v1/stream/replayed"
    speeds: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    # Without compression in the Node server: these bytes do not compress, so it would only cost CPU time.
    with headwater("file-durable", **UNLIMITED) as ours, official_node("file", arguments=("--no-compression",)) as node:
        memory = Memory(ours.pid)
        for server in (ours, node):
            fill(server, path, mebibytes, message_bytes)
        with on_core(LOAD_CORE):
            for _ in range(rounds):
                for server in (ours, node):
                    before = cpu_seconds(server.pid)
                    total, seconds = read_through(server, path, memory if server is ours else None)
                    assert total == mebibytes * MIB, f"{server.name} sent {total} bytes"
                    speeds.setdefault(server.name, []).append(total / 1e6 / seconds)
                    costs.setdefault(server.name, []).append((cpu_seconds(server.pid) - before) / (total / 1e9))
    found = statistics.median(a / b for a, b in zip(speeds["headwater"], speeds["official node"], strict=True))
    print(f"replay of {mebibytes} MiB in messages of {message_bytes} bytes, {rounds} rounds")
    for name, measured in speeds.items():
        cost = statistics.median(costs[name])
        print(f"  {name:<16}{statistics.median(measured):>9.0f} MB/s   {cost:.2f} s of the server's CPU for a GB")
    print(
        f"  headwater / official node: {found:.1f} (wanted: 3); our peak memory: {memory.own_bytes / MIB:.0f} MiB of"
        f" its own, {memory.mapped_bytes / MIB:.0f} MiB of files mapped"
    )
    return {
        "mebibytes": mebibytes,
        "message_bytes": message_bytes,
        "ratio": found,
        "cpu_seconds_per_gb": {name: round(statistics.median(each), 2) for name, each in costs.items()},
        "own_mebibytes": round(memory.own_bytes / MIB),
        "mapped_mebibytes": round(memory.mapped_bytes / MIB),
    }


# -- many streams ------------------------------------------------------------------------------------------------------


def create_many(port: int, count: int) -> None:
    """Create streams over many connections at once, so that creates share commits."""
    body = "x" * 100
    with ExitStack() as opened:
        connections = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120)) for _ in range(128)
        ]
        readers = [opened.enter_context(connection.makefile("rb")) for connection in connections]
        for start in range(0, count, len(connections)):
            numbers = range(start, min(start + len(connections), count))
            for number, connection in zip(numbers, connections, strict=False):
                connection.sendall(
                    f"PUT /v1/stream/many/{number % 100}/{number} HTTP/1.1\r\nHost: localhost\r\n"
                    f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
                )
            for _, reader in zip(numbers, readers, strict=False):
                _skip_answer(reader)


def _skip_answer(reader: Any) -> None:
    status = reader.readline()
    assert b" 201 " in status, status
    length = 0
    while (line := reader.readline()) != b"\r\n":
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    reader.read(length)


class Booted(NamedTuple):
    seconds: float
    """Time until it listened."""
    own_bytes: int
    descriptors: int
    threads: int


def boot(mode: str, directory: Path) -> Booted:
    with on_core(SERVER_CORE):
        started = time.perf_counter()
        with serve(directory=directory, DS_STORAGE__MODE=mode) as server:
            seconds = time.perf_counter() - started
            time.sleep(0.5)
            proc = Path(f"/proc/{server.pid}")
            own, _ = memory_of(proc / "status")
            return Booted(seconds, own, len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir())))


def many_streams(count: int, modes: tuple[str, ...] = ("file-durable", "acid")) -> dict[str, Any]:
    found: dict[str, Any] = {"count": count}
    for mode in modes:
        with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name:
            directory = Path(name)
            empty = boot(mode, directory)
            with serve(directory=directory, DS_STORAGE__MODE=mode) as server:
                create_many(server.port, count)
            full = boot(mode, directory)
        each = (full.own_bytes - empty.own_bytes) / count
        print(
            f"{count} streams of one message, {mode}: boot {full.seconds:.1f} s (empty: {empty.seconds:.1f} s),"
            f" {each:.0f} bytes for an idle stream (wanted: 2048), {full.descriptors} descriptors,"
            f" {full.threads} threads"
        )
        found[mode] = {
            "boot_s": round(full.seconds, 2),
            "empty_boot_s": round(empty.seconds, 2),
            "bytes_each": round(each),
            "descriptors": full.descriptors,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="length of a round of appends")
    parser.add_argument("--streams", type=int, default=1, help="streams that appends go round")
    parser.add_argument("--mebibytes", type=int, default=256, help="size of the stream that is replayed")
    parser.add_argument("--message-bytes", type=int, default=65536, help="size of a message of it")
    parser.add_argument("--count", type=int, default=100_000, help="how many streams a boot has to bear")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    summary: dict[str, Any] = {"benchmark": "durable"}
    if "node" in parts:
        summary["node"] = appends_against_node(arguments.seconds, arguments.rounds, arguments.streams)
    if "modes" in parts:
        summary["modes"] = appends_by_mode(arguments.seconds, arguments.rounds, arguments.streams)
    if "replay" in parts:
        summary["replay"] = replay(arguments.mebibytes, arguments.message_bytes, min(arguments.rounds, 3))
    if "streams" in parts:
        summary["streams"] = many_streams(arguments.count)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
