"""The tables of a cluster in Postgres under load at a constant rate: after a while they must not grow.

    python -m tests.cluster.nodes.tables --minutes 30

The row of a shard changes at every commit, and the journal gets a row that is deleted once the object store has it. The
largest size of the last third of the time is compared with that of the middle third.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from itertools import pairwise
from typing import Any

from headwater.cluster.nodes.schema import connect
from tests.cluster.nodes.clusters import RunningCluster, running_cluster
from tests.crash.wire import Client, Lost, NotSent

WRITERS = 6
EVERY_S = 0.04
"""How often a writer appends: 150 appends per second in all."""
BODY_BYTES = (1_000,) * 9 + (8_000,)
"""Postgres keeps the larger ones in a separate table."""
SAMPLE_S = 5.0
ALLOWED_SHARE = 0.10
ALLOWED_KIB = 64.0
SIZES = {
    "shard, table": "pg_table_size('headwater.shard')",
    "shard, index": "pg_indexes_size('headwater.shard')",
    "journal, table": "pg_table_size('headwater.journal')",
    "journal, index": "pg_indexes_size('headwater.journal')",
}
"""With the rows that are kept outside of the table (TOAST)."""
THIRDS = ("first", "middle", "last")


async def write(cluster: RunningCluster, number: int, until: float, counts: Counter[str]) -> None:
    """Append at a constant rate, without making up for lost time."""
    dice = random.Random(number)
    shard = number % cluster.shards
    path = f"/v1/stream/{cluster.name_in(shard, f'tables-{number}-')}"
    text = {"Content-Type": "text/plain"}
    client = Client(int(cluster.url(number % len(cluster.nodes)).rsplit(":", 1)[1]))
    while time.monotonic() < until:
        next_s = time.monotonic() + EVERY_S
        try:
            reply = await client.request("POST", path, text, dice.randbytes(dice.choice(BODY_BYTES)))
            if reply.status == 404:
                await client.request("PUT", path, text)
            counts["appends" if reply.status == 204 else "repeated"] += 1
        except (Lost, NotSent, TimeoutError):
            counts["repeated"] += 1
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
    client.close()


def sizes_of(cluster: RunningCluster) -> dict[str, float]:
    """Sizes in KiB, and how often rows of shards have changed."""
    with connect(cluster.postgres.url, "test") as connection:
        row = connection.execute(f"SELECT {', '.join(SIZES.values())}").fetchone()
        updates = connection.execute("SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'shard'").fetchone()
    assert row is not None
    assert updates is not None
    sizes = {name: int(str(size)) / 1024 for name, size in zip(SIZES, row, strict=True)}
    return {**sizes, "updates": float(str(updates[0]))}


async def load(cluster: RunningCluster, minutes: float) -> list[dict[str, float]]:
    began = time.monotonic()
    until = began + minutes * 60
    counts = Counter(appends=0, repeated=0)
    samples: list[dict[str, float]] = []
    async with asyncio.TaskGroup() as group:
        for number in range(WRITERS):
            group.create_task(write(cluster, number, until, counts))
        while time.monotonic() < until:
            await asyncio.sleep(SAMPLE_S)
            found = await asyncio.to_thread(sizes_of, cluster)
            samples.append({"minute": (time.monotonic() - began) / 60, **counts, **found})
            if len(samples) % 12 == 0:
                print(json.dumps(samples[-1]), flush=True)  # noqa: T201 - a run takes half an hour
    return samples


def judge(samples: list[dict[str, float]]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The largest size in each third, with the appends of that time; and descriptions of those that grow.

    More appends in the same time need a larger journal, so its size is compared at the same rate.
    """
    cuts = [len(samples) * part // 3 for part in range(4)]
    thirds = [samples[begin:end] for begin, end in pairwise(cuts)]
    appends = [third[-1]["appends"] - third[0]["appends"] for third in thirds]
    found: dict[str, dict[str, float]] = {"appends": dict(zip(THIRDS, appends, strict=True))}
    rate_grew = max(1.0, appends[2] / max(1.0, appends[1]))
    growing = []
    for name in SIZES:
        largest = [max(each[name] for each in third) for third in thirds]
        found[name] = dict(zip(THIRDS, largest, strict=True))
        allowed = largest[1] * (rate_grew if name.startswith("journal") else 1.0) * (1 + ALLOWED_SHARE) + ALLOWED_KIB
        if largest[2] > allowed:
            growing.append(f"{name} grew from {largest[1]:.0f} to {largest[2]:.0f} KiB ({allowed:.0f} are allowed)")
    return found, growing


def run(minutes: float) -> dict[str, Any]:
    with running_cluster({"DS_CLUSTER__STANDBYS": "1"}, nodes=2, shards=2) as cluster:
        samples = asyncio.run(load(cluster, minutes))
    found, growing = judge(samples)
    last = samples[-1]
    counts = {name: last.get(name, 0) for name in ("appends", "repeated", "updates")}
    return {"minutes": minutes, **counts, "numbers": found, "growing": growing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    found = run(parser.parse_args().minutes)
    print(json.dumps(found, indent=1))  # noqa: T201
    raise SystemExit(1 if found["growing"] else 0)


if __name__ == "__main__":
    main()
