"""A cluster on one machine: appends against one node and against Postgres alone, failover, and the start of a node.

    python -m bench.cluster                          three nodes, three Postgres servers, SeaweedFS; three minutes
    python -m bench.cluster --only failover --kills 20 --standbys 2
    python -m bench.cluster --only start --store-mib 10240
    python -m bench.cluster --only reads --standbys 1
    python -m bench.cluster --only commits

Appends: one connection, and 32, of 100 bytes each to its own stream, through the nodes in turn. The plain INSERT writes
the same bytes with one statement per row into the same Postgres, by as many connections. Failover: kill -9 of all
processes of a node, until an append to its shard is acknowledged through another node. Reads: the same stream through
its owner's node, the one with its standby, and the one that relays, also while it is appended to. Commits: how many
batches Postgres takes from so many shards at once, without nodes. Start: nodes with empty disks and so much in the
object store (set TMPDIR to a disk with room for three times as much). All processes share one machine, so rates say
little; compare the columns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import obstore
import psutil
import psycopg
import uvloop
from tests.cluster.nodes.clusters import RunningCluster, running_cluster
from tests.cluster.nodes.servers import replicated_postgres
from tests.serving import serve, server_environment
from tests.waiting import wait_until

from bench.limits import Sender, encode
from headwater.cluster.nodes.postgres_journal import PostgresJournal
from headwater.cluster.nodes.schema import connect, create_tables

BODY = b"x" * 100
TEXT = {"Content-Type": "text/plain"}
PARTS = ("appends", "failover", "start", "reads", "commits")
COMMITS = ((1, 100), (3, 100), (16, 100), (64, 100), (1, 10_000), (16, 10_000))
"""Shards that commit at once, and the bytes of a batch."""
FILLING_BYTES = 4 * 2**20
LEASE_S = "2.5"
"""The default of the setting, which decides how long a failover takes."""


def summary(latencies_s: list[float], seconds: float) -> dict[str, float]:
    cuts = statistics.quantiles(latencies_s, n=100)
    return {
        "per_s": round(len(latencies_s) / seconds, 1),
        "p50_ms": round(cuts[49] * 1000, 2),
        "p99_ms": round(cuts[98] * 1000, 2),
    }


async def appends(urls: list[str], connections: int, seconds: float) -> dict[str, float]:
    """Appends by so many connections, each to its own stream, to the servers in turn."""
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient() as client:
        for number in range(connections):
            await client.put(f"{urls[0]}/v1/stream/bench-{connections}-{number}", headers=TEXT)
    latencies_s: list[float] = []
    senders: list[Sender] = []
    for number in range(connections):
        address = urlsplit(urls[number % len(urls)])
        assert address.hostname is not None
        assert address.port is not None
        request = encode("POST", f"/v1/stream/bench-{connections}-{number}", BODY)
        make = partial(Sender, request, latencies_s)
        senders.append((await loop.create_connection(make, address.hostname, address.port))[1])
    await asyncio.sleep(1)
    latencies_s.clear()
    await asyncio.sleep(seconds)
    measured = list(latencies_s)
    for sender in senders:
        sender.is_last = True
    await asyncio.gather(*(sender.stopped for sender in senders))
    return summary(measured, seconds)


def inserts(url: str, connections: int, seconds: float) -> dict[str, float]:
    """The same bytes as rows, one statement each."""
    with connect(url, "bench") as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS plain (id bigserial PRIMARY KEY, body bytea)")
    latencies_s: list[float] = []
    until_s = time.perf_counter() + seconds

    def insert() -> None:
        with connect(url, "bench") as connection:
            while (began_s := time.perf_counter()) < until_s:
                connection.execute("INSERT INTO plain (body) VALUES (%b)", [BODY])
                latencies_s.append(time.perf_counter() - began_s)

    threads = [threading.Thread(target=insert) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summary(latencies_s, seconds)


def commits(url: str, shards: int, size: int, seconds: float) -> dict[str, float]:
    """Batches of this size, committed by so many shards at once: what limits a cluster, however many nodes it has."""
    latencies_s: list[float] = []
    until_s = time.perf_counter() + seconds

    def commit(shard: int) -> None:
        journal = PostgresJournal(url, shard, epoch=0)
        lsn = journal.last_lsn
        while (began_s := time.perf_counter()) < until_s:
            journal.append(lsn, lsn + 1, [b"x" * size])
            lsn += 1
            latencies_s.append(time.perf_counter() - began_s)
        journal.close()

    with ThreadPoolExecutor(shards) as threads:
        list(threads.map(commit, range(shards)))
    time.sleep(0.2)  # Until the server has ended the processes of the connections.
    return summary(latencies_s, seconds)


def measure_commits(seconds: float, note: Callable[[str, object], None]) -> None:
    with replicated_postgres() as postgres:
        with connect(postgres.url, "bench") as connection:
            create_tables(connection, "bench", max(shards for shards, _ in COMMITS))
        for shards, size in COMMITS:
            before = [server_cpu(each.process) for each in postgres.servers]
            found = commits(postgres.url, shards, size, seconds)
            count = found["per_s"] * seconds
            used = [
                (server_cpu(each.process) - cpu) * 1000 / count
                for each, cpu in zip(postgres.servers, before, strict=True)
            ]
            primary = used.pop(postgres.primary)
            found |= {"primary_cpu_ms": round(primary, 3), "standby_cpu_ms": round(statistics.mean(used), 3)}
            note(f"commits of {size} bytes by {shards} shards", found)


def server_cpu(postmaster: subprocess.Popen[bytes] | None) -> float:
    """CPU time of a Postgres server, also of connections that have ended."""
    assert postmaster is not None
    main = psutil.Process(postmaster.pid)
    used = main.cpu_times()
    ended: float = used.children_user + used.children_system
    return ended + sum(
        times.user + times.system for times in (used, *(each.cpu_times() for each in main.children(recursive=True)))
    )


def failovers(cluster: RunningCluster, kills: int) -> dict[str, float]:
    """Seconds from the death of a node to the first append to one of its shards, through another node."""
    took_s = []
    with httpx.Client(timeout=30) as client:
        for shard in range(cluster.shards):
            client.put(f"{cluster.url(0)}/v1/stream/{cluster.name_in(shard)}", headers=TEXT)

        for number in range(kills):
            victim = number % 3
            if cluster.settings["DS_CLUSTER__STANDBYS"] != "0":
                cluster.wait_until_warm()
            owned = [shard for shard, node in cluster.owners().items() if node == f"node-{victim}"]
            url = f"{cluster.url((victim + 1) % 3)}/v1/stream/{cluster.name_in(owned[0])}"
            cluster.kill(victim)
            began_s = time.perf_counter()
            append = partial(status_of, client, "POST", url, BODY)
            wait_until(append, lambda status: status == 204, what="an append", every_s=0.02)
            took_s.append(time.perf_counter() - began_s)
            cluster.start(victim)
            cluster.wait_until_shared(0, 1, 2)
    return {"p50_s": round(statistics.median(took_s), 2), "max_s": round(max(took_s), 2), "kills": kills}


def reads(cluster: RunningCluster, size: int, seconds: float, *, is_written: bool) -> dict[str, dict[str, float]]:
    """Reads of one stream through each node, and the CPU time of the owner's node for each read."""
    cluster.wait_until_warm()
    name = cluster.name_in(0, f"read-{size}-{is_written}-")
    owner, standby = str(cluster.owners()[0]), cluster.standby_of(0)
    (other,) = {"node-0", "node-1", "node-2"} - {owner, standby}
    found = {}
    ended = threading.Event()

    def write(url: str) -> None:
        with httpx.Client() as client:
            while not ended.wait(0.01):
                client.post(url, content=b"y", headers=TEXT)

    with httpx.Client(timeout=30) as client:
        there = f"{cluster.url(int(owner[-1]))}/v1/stream/{name}"
        client.put(there, headers=TEXT, content=bytes(size))
        writer = threading.Thread(target=write, args=[there])
        if is_written:
            writer.start()
        for what, node in (("owner", owner), ("standby", standby), ("relay", other)):
            url = f"{cluster.url(int(node[-1]))}/v1/stream/{name}?offset=-1"
            latencies_s: list[float] = []
            cpu_s, until_s = cpu_of(cluster, owner), time.perf_counter() + seconds
            while (began_s := time.perf_counter()) < until_s:
                assert client.get(url).status_code == 200
                latencies_s.append(time.perf_counter() - began_s)
            cpu_ms = (cpu_of(cluster, owner) - cpu_s) * 1000 / len(latencies_s)
            found[what] = {**summary(latencies_s, seconds), "owner_cpu_ms": round(cpu_ms, 3)}
        ended.set()
        if is_written:
            writer.join()
    return found


def cpu_of(cluster: RunningCluster, node: str) -> float:
    times = [process.cpu_times() for process in cluster.processes(int(node[-1]))]
    return sum(each.user + each.system for each in times)


def start_with(settings: dict[str, str], mebibytes: int, note: Callable[[str, object], None]) -> None:
    """Start nodes that have nothing on their disks, with so much in the object store: one stream of each shard."""
    with running_cluster(settings, nodes=0) as cluster:
        names = [cluster.name_in(shard, "large-") for shard in range(cluster.shards)]
        store(cluster, names, mebibytes * 2**20)
        note("object store, MiB", stored(cluster) // 2**20)
        began_s = time.perf_counter()
        cluster.start(0)
        note("an empty node listens, s", round(time.perf_counter() - began_s, 2))
        await_served(cluster, 0, names)
        note("it serves all shards, s", round(time.perf_counter() - began_s, 2))
        note("its memory, MiB", memory(cluster))
        note("first read of the beginning of each stream, s", [first_read(cluster, name) for name in names])
        cluster.start(1)
        cluster.wait_until_shared(0, 1)
        owned = [name for name, owner in zip(names, cluster.owners().values(), strict=True) if owner == "node-0"]
        began_s = time.perf_counter()
        cluster.kill(0)
        await_served(cluster, 1, owned)
        note(
            f"{len(owned)} shards are served by another node, s after the kill", round(time.perf_counter() - began_s, 2)
        )
        note("memory, MiB", memory(cluster))


def store(cluster: RunningCluster, names: list[str], size: int) -> None:
    """Write to one server, and copy its directory into the cluster: that is faster than through the journal."""
    with tempfile.TemporaryDirectory(prefix="headwater-source-") as directory:
        with (
            serve(directory=Path(directory), DS_STORAGE__MODE="file-durable") as server,
            httpx.Client(timeout=60) as client,
        ):
            for number, name in enumerate(names):
                body = random.Random(number).randbytes(FILLING_BYTES)
                client.put(server.stream_url(name), headers=TEXT)
                for _ in range(size // len(names) // FILLING_BYTES):
                    append = partial(status_of, client, "POST", server.stream_url(name), body)
                    wait_until(append, lambda status: status == 204, what="an append")
        source = ("--from-mode", "file-durable", "--from-dir", str(Path(directory) / "data" / "streams"))
        command = [sys.executable, "-m", "headwater", "store", "copy", *source, "--to-mode", "cluster"]
        subprocess.run(command, env=server_environment(**cluster.environment(0)), check=True)


def status_of(client: httpx.Client, method: str, url: str, body: bytes = b"") -> int:
    """The status of a response, 0 without one."""
    try:
        return client.request(method, url, content=body, headers=TEXT).status_code
    except httpx.HTTPError:
        return 0


def await_served(cluster: RunningCluster, node: int, names: list[str]) -> None:
    with httpx.Client(timeout=60) as client:
        for name in names:
            ask = partial(status_of, client, "HEAD", f"{cluster.url(node)}/v1/stream/{name}")
            wait_until(ask, lambda status: status == 200, what=name, limit_s=600)


def first_read(cluster: RunningCluster, name: str) -> float:
    """Seconds until the first chunk is there, which comes from the object store."""
    began_s = time.perf_counter()
    response = httpx.get(f"{cluster.url(0)}/v1/stream/{name}?offset=-1", timeout=60)
    assert response.status_code == 200, response.text
    assert response.content
    return round(time.perf_counter() - began_s, 2)


def stored(cluster: RunningCluster) -> int:
    """Bytes in the object store."""
    found = obstore.list(cluster.store.open())
    return sum(each["size"] for page in found for each in page)


def memory(cluster: RunningCluster) -> dict[str, float]:
    """Memory that only the processes of a node use (unique set size), in MiB."""
    used = {
        f"node-{number}": round(sum(each.memory_full_info().uss for each in cluster.processes(number)) / 2**20)
        for number in sorted(cluster.nodes)
    }
    return {**used, "processes": float(sum(len(cluster.processes(number)) for number in cluster.nodes))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--store-mib", type=int, default=256)
    parser.add_argument("--only", choices=PARTS, help="one part, for a machine that is quiet only for minutes")
    parser.add_argument("--standbys", type=int, default=0, help="the setting cluster.standbys of each node")
    given = parser.parse_args()
    parts = (given.only,) if given.only else PARTS
    found: dict[str, object] = {}

    def note(what: str, value: object) -> None:
        found[what] = value
        print(f"{what}: {value}", flush=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if "appends" in parts:
            with serve(DS_STORAGE__MODE="file-durable") as one:
                for connections in (1, 32):
                    note(f"file-durable, {connections}", runner.run(appends([one.url], connections, given.seconds)))
        settings = {
            "DS_CLUSTER__LEASE_SECS": LEASE_S,
            "DS_CLUSTER__STANDBYS": str(given.standbys),
            "DS_CLUSTER__STANDBY_READS": str("reads" in parts),
        }
        if "start" in parts:
            start_with(settings, given.store_mib, note)
        if "commits" in parts:
            measure_commits(given.seconds, note)
        if {"appends", "failover", "reads"} & set(parts):
            with running_cluster(settings) as cluster:
                measure(cluster, runner, parts, given, note)
    print(json.dumps({**found, "load": os.getloadavg()}))


def measure(
    cluster: RunningCluster,
    runner: asyncio.Runner,
    parts: tuple[str, ...],
    given: argparse.Namespace,
    note: Callable[[str, object], None],
) -> None:
    note("memory at first, MiB", memory(cluster))
    if "appends" in parts:
        measure_appends(cluster, runner, given.seconds, note)
    if "failover" in parts:
        note("failover", failovers(cluster, given.kills))
    if "reads" in parts and given.standbys:
        for size, is_written in itertools.product((100, 4 * 2**20), (False, True)):
            found_reads = reads(cluster, size, given.seconds, is_written=is_written)
            note(f"reads of {size} bytes{', with appends' * is_written}", found_reads)


def measure_appends(
    cluster: RunningCluster, runner: asyncio.Runner, seconds: float, note: Callable[[str, object], None]
) -> None:
    urls = [cluster.url(number) for number in range(3)]
    names = [f"node-{number}" for number in range(3)]
    primary = cluster.postgres.servers[cluster.postgres.primary].process

    def used_s() -> tuple[float, float]:
        return sum(cpu_of(cluster, name) for name in names), server_cpu(primary)

    for connections in (1, 32):
        before = used_s()
        found = runner.run(appends(urls, connections, seconds))
        # With those of the second before the measurement.
        count = found["per_s"] * (seconds + 1)
        nodes, database = ((end - begin) * 1000 / count for begin, end in zip(before, used_s(), strict=True))
        note(
            f"cluster, {connections}", {**found, "nodes_cpu_ms": round(nodes, 3), "primary_cpu_ms": round(database, 3)}
        )
        try:
            note(f"INSERT, {connections}", inserts(cluster.postgres.url, connections, seconds))
        except psycopg.Error as error:
            note(f"INSERT, {connections}", str(error))
    note("memory, MiB", memory(cluster))


if __name__ == "__main__":
    main()
