"""Shapes: time from an INSERT to the callback of the real client, and memory of an idle reader.

Run as `python -m bench.shapes [INSERTS]`. Everything runs on this machine: Postgres, the stream server,
`headwater shapes`, and the clients in one Node.js process.
"""

from __future__ import annotations

import argparse
import socket
import time

import psutil
import psycopg
from tests.shapes.npm_readers import Readers, npm_readers
from tests.shapes.serving import Shapes, shapes

PAUSE_S = {1: 0.05, 200: 1.0}
"""Pause between inserts, by the number of readers: each insert makes every reader send a new request."""
IDLE_READERS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inserts", type=int, nargs="?", default=200, help="inserts that one reader waits for")
    inserts_of_one: int = parser.parse_args().inserts
    with shapes("items", DS_SHAPES__LONG_POLL_TIMEOUT_SECS="300", DS_SHAPES__SSE_TIMEOUT_SECS="300") as running:
        running.sql("CREATE TABLE items (id int PRIMARY KEY, title text, n int)")
        # A row to wait for: a reader of an empty table would look ready immediately.
        running.sql("INSERT INTO items VALUES (-1, 'first', 0)")
        for mode in ("long-poll", "SSE"):
            # In a new process, because memory left by earlier connections would hide the memory of these.
            running.kill()
            running.start()
            print(f"idle {mode} reader: {idle_kib(running, sse=mode == 'SSE'):.1f} KiB", flush=True)
        print("| readers | mode | p50 ms | p99 ms |\n|---|---|---|---|")
        first = 0
        for count in (1, 200):
            inserts = inserts_of_one if count == 1 else max(20, inserts_of_one // 5)
            for mode in ("long-poll", "SSE"):
                with npm_readers() as readers:
                    times = latencies(running, readers, count, first, inserts, sse=mode == "SSE")
                first += inserts
                print(f"| {count} | {mode} | {at(times, 0.5):.1f} | {at(times, 0.99):.1f} |", flush=True)


def latencies(running: Shapes, readers: Readers, count: int, first: int, inserts: int, *, sse: bool) -> list[float]:
    """Milliseconds from before the INSERT to the callback of each reader."""
    names = [f"reader-{number}" for number in range(count)]
    for name in names:
        readers.open(name, running.url, {"table": "items"}, ["id"], sse=sse, stamp="id")
    everything = running.sql("SELECT id FROM items")
    readers.wait(names, everything)
    sent: dict[str, float] = {}
    with psycopg.connect(running.postgres.url, autocommit=True) as connection:
        for number in range(first, first + inserts):
            sent[str(number)] = time.time() * 1000
            connection.execute(b"INSERT INTO items VALUES (%s, 'x', 1)", [number])
            time.sleep(PAUSE_S[count])
    readers.wait(names, running.sql("SELECT id FROM items"))
    found: list[float] = []
    for name in names:
        seen = readers.ask("seen", id=name)
        found += [seen[number] - at for number, at in sent.items()]
    return sorted(found)


def at(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(len(times) * share))]


def idle_kib(running: Shapes, *, sse: bool) -> float:
    assert running.process is not None
    reading = running.everything(table="items")
    process = psutil.Process(running.process.pid)
    target = f"/v1/shape?table=items&offset={reading.offset}&handle={reading.handle}&live=true"
    target += "&live_sse=true" if sse else ""
    request = f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    before = process.memory_info().rss
    connections = []
    for _ in range(IDLE_READERS):
        connection = socket.create_connection(("127.0.0.1", running.port))
        connection.sendall(request)
        connections.append(connection)
    time.sleep(3.0)
    used = process.memory_info().rss - before
    for connection in connections:
        connection.close()
    return used / IDLE_READERS / 1024


if __name__ == "__main__":
    main()
