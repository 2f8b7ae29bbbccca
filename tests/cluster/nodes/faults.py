"""What happens to a cluster while its clients' history is logged.

    python -m tests.cluster.nodes.faults --rounds 50 --seed 7

Each fault leaves a cluster that works again, so that any sequence of them can follow. After the last one the history is
judged; the seed decides the faults and what the clients do, not the timing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg

from tests.cluster.nodes.clusters import RunningCluster, link_tls_settings, running_cluster
from tests.crash.stream_lifecycles import fork_repeatedly, recreate_repeatedly
from tests.crash.subscription_workload import SubscriptionWorkload
from tests.crash.workload import Violation
from tests.pressure import clients
from tests.pressure.clients import Fleet, FleetWorkload
from tests.pressure.disruptions import ALL_ACKED_S
from tests.pressure.history import check
from tests.waiting import LIMIT_S

log = logging.getLogger(__name__)

CALM_S = (0.2, 0.6)
SETTINGS = {"DS_EXPIRY__SWEEP_INTERVAL_SECS": "0.2"}
"""Forks that expire are removed soon."""
ENOUGH = {"work appended": 1.1, "acks": 0.1, "fork trees": 0.1, "lifecycles": 0.1}
"""What the clients must have done, per fault, so that a run says something about it: a busy machine takes longer."""


class ClusterScene:
    def __init__(self, cluster: RunningCluster, fleet: Fleet) -> None:
        self.cluster = cluster
        self.fleet = fleet
        self.dice = fleet.dice
        self.lease_s = float(cluster.environment(0)["DS_CLUSTER__LEASE_SECS"])

    def node(self) -> int:
        return self.dice.choice(sorted(self.cluster.nodes))

    async def wait(self, low: float, high: float) -> None:
        await asyncio.sleep(self.dice.uniform(low, high))

    async def whole(self) -> None:
        """Until every node has shards again."""
        await asyncio.to_thread(self.cluster.wait_until_shared, *self.cluster.nodes)


async def kill_node(scene: ClusterScene) -> None:
    """kill -9 of all processes of a node; it starts again on an empty disk."""
    number = scene.node()
    scene.cluster.kill(number)
    await scene.wait(0, 2 * scene.lease_s)
    await asyncio.to_thread(scene.cluster.start, number)


async def pause_node(scene: ClusterScene) -> None:
    """SIGSTOP of a node for longer than its lease: it does not know that others took its shards over."""
    with scene.cluster.paused(scene.node()):
        await scene.wait(1.5 * scene.lease_s, 2 * scene.lease_s)


async def pause_briefly(scene: ClusterScene) -> None:
    """SIGSTOP of a node for less than its lease."""
    with scene.cluster.paused(scene.node()):
        await scene.wait(0.1, 0.5 * scene.lease_s)


async def kill_shard(scene: ClusterScene) -> None:
    """kill -9 of the process of one shard, or of the keeper of a node, which then ends."""
    number = scene.node()
    children = scene.cluster.processes(number)[1:]
    if not children:
        return
    killed = scene.dice.choice(children)
    with suppress(psutil.NoSuchProcess):
        killed.kill()
    if killed == children[0]:
        # Without its keeper a node ends, once it has closed its connections.
        await asyncio.to_thread(scene.cluster.nodes[number].process.wait)
        await asyncio.to_thread(scene.cluster.start, number)
    else:
        await scene.wait(0.1, 0.5)


async def pause_shard(scene: ClusterScene) -> None:
    """SIGSTOP of the process of one shard for longer than its lease; the node kills it if it does not answer."""
    children = scene.cluster.processes(scene.node())[2:]
    if children:
        process = scene.dice.choice(children)
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            await scene.wait(1.2 * scene.lease_s, 1.5 * scene.lease_s)
            process.resume()


async def kill_primary(scene: ClusterScene) -> None:
    """kill -9 of the primary of Postgres; a standby is promoted, and the former primary is built again."""
    postgres = scene.cluster.postgres
    postgres.servers[postgres.primary].kill()
    await scene.wait(0, 0.5)
    await asyncio.to_thread(postgres.watch)


async def lose_primary(scene: ClusterScene) -> None:
    """As `kill_primary`, after a while in which nothing is replicated and commits that wait for it are cancelled."""
    postgres = scene.cluster.postgres
    primary = postgres.servers[postgres.primary]
    assert primary.process is not None
    children = psutil.Process(primary.process.pid).children()
    senders = [process for process in children if "walsender" in " ".join(process.cmdline())]
    for process in senders:
        process.suspend()
    with psycopg.connect(primary.url, autocommit=True) as admin:
        for _ in range(10):
            admin.execute("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
            await scene.wait(0.0, 0.1)
    primary.kill()
    for process in senders:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await asyncio.to_thread(postgres.watch)


async def pause_primary(scene: ClusterScene) -> None:
    """SIGSTOP of the primary of Postgres for longer than a lease: connections stay open, and nothing is answered."""
    postgres = scene.cluster.postgres
    primary = postgres.servers[postgres.primary].process
    assert primary is not None
    main = psutil.Process(primary.pid)
    stopped = [main, *main.children(recursive=True)]
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    await scene.wait(1.2 * scene.lease_s, 1.5 * scene.lease_s)
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()


async def stop_store(scene: ClusterScene) -> None:
    """The object store cannot be reached for a while."""
    await asyncio.to_thread(scene.cluster.store.stop)
    await scene.wait(0.2, 1.5)
    await asyncio.to_thread(scene.cluster.store.start)


async def drain_node(scene: ClusterScene) -> None:
    """SIGTERM: a node hands its shards over, and starts again."""
    number = scene.node()
    await asyncio.to_thread(scene.cluster.nodes.pop(number).stop)
    await asyncio.to_thread(scene.cluster.start, number)


async def cut(scene: ClusterScene) -> None:
    """All connections of the clients break, several times."""
    for _ in range(4):
        scene.fleet.cut()
        await scene.wait(0.0, 0.1)


async def cut_links(scene: ClusterScene) -> None:
    """The connections of a node to Postgres or to the object store break at any byte, or all of them for a while."""
    network = scene.cluster.networks[scene.node()]
    if scene.dice.random() < 0.5:
        for _ in range(8):
            link = scene.dice.choice([*network.postgres, network.store])
            link.left = scene.dice.randrange(200)
            await scene.wait(0.0, 0.1)
        for link in network.links:
            link.left = None
        return
    links = scene.dice.choice([network.postgres, [network.store], network.links])
    for link in links:
        link.cut()
    await scene.wait(0.1, 1.2 * scene.lease_s)
    for link in links:
        link.restore()


Fault = Callable[[ClusterScene], Awaitable[None]]
FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_node,
        pause_node,
        kill_primary,
        kill_shard,
        pause_shard,
        drain_node,
        pause_briefly,
        stop_store,
        cut,
        cut_links,
        pause_primary,
        lose_primary,
    )
}


async def endure_faults(cluster: RunningCluster, faults: list[str], seed: int) -> Counter[str]:
    """Run the clients through these faults, then judge their history.

    Clients of forks, of streams that end and of a subscription judge each response themselves: nobody else uses theirs.
    """
    root = f"{seed}/"
    fleet = Fleet([cluster.url(number) for number in sorted(cluster.nodes)], random.Random(seed), root)
    scene = ClusterScene(cluster, fleet)
    workload = FleetWorkload(fleet)
    subscription = SubscriptionWorkload(workload, streams=3, root=root)
    done: list[str] = []
    try:
        await clients.set_up(fleet, 3)
        await subscription.set_up()
        running = [*clients.everybody(fleet), subscription.append_work()]
        running += [fork_repeatedly(workload, f"/v1/stream/{root}forks/{number}") for number in range(2)]
        running += [recreate_repeatedly(workload, f"/v1/stream/{root}lifecycles/{number}") for number in range(2)]
        async with asyncio.TaskGroup() as group:
            for client in running:
                group.create_task(client)
            worker = group.create_task(subscription.run_worker())
            for name in faults:
                await scene.wait(*CALM_S)
                done.append(name)
                log.info("fault %d of %d: %s", len(done), len(faults), name)
                await FAULTS[name](scene)
            await scene.whole()
            await scene.wait(*CALM_S)
            deadline_s = time.monotonic() + LIMIT_S
            while any(workload.counts[what] < each * len(faults) for what, each in ENOUGH.items()):
                if time.monotonic() > deadline_s:
                    raise Violation(f"the clients make no progress after the last fault: {dict(workload.counts)}")
                await scene.wait(*CALM_S)
            fleet.running = workload.running = False
            await subscription.wait_until_all_acked(ALL_ACKED_S)
            worker.cancel()
        content = {path: await clients.content(fleet, path) for path in fleet.kept}
        return check(fleet.history, content) + fleet.counts + workload.counts
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = next((each for each in error.exceptions if isinstance(each, Violation)), error.exceptions[0])
        logs = "\n".join(f"node-{number}:\n{node.log()[-3000:]}" for number, node in cluster.nodes.items())
        error.add_note(f"seed {seed}, faults {done}; the logs end:\n{logs}")
        raise error from None
    finally:
        await fleet.close()


def run(
    faults: list[str], seed: int, *, standbys: int = 0, standby_reads: bool = False, tls: bool = False
) -> Counter[str]:
    """A new cluster with these settings, and what its clients did during the faults."""
    settings = {**SETTINGS, "DS_CLUSTER__STANDBYS": str(standbys), "DS_CLUSTER__STANDBY_READS": str(standby_reads)}
    with tempfile.TemporaryDirectory(prefix="headwater-certificates-") as directory:
        if tls:
            settings |= link_tls_settings(Path(directory))
        with running_cluster(settings, has_networks=True) as cluster:
            counts = asyncio.run(endure_faults(cluster, faults, seed))
            counts["standby reads of the last processes"] = cluster.standby_reads()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    parser.add_argument("--only", choices=FAULTS)
    parser.add_argument("--standbys", type=int, default=0, help="the setting cluster.standbys of each node")
    parser.add_argument("--standby-reads", action="store_true", help="the setting cluster.standby_reads of each node")
    parser.add_argument("--tls", action="store_true", help="use TLS between the nodes")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)  # noqa: T201 - needed to replay, also after a crash
    names = [chosen.only] if chosen.only else list(FAULTS)
    faults = random.Random(chosen.seed).choices(names, k=chosen.rounds)
    counts = run(faults, chosen.seed, standbys=chosen.standbys, standby_reads=chosen.standby_reads, tls=chosen.tls)
    print(json.dumps(counts))  # noqa: T201


if __name__ == "__main__":
    main()
