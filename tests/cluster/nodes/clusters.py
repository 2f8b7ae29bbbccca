"""A real cluster for tests: Postgres servers, an object store, and nodes that can be killed, paused and drained."""

from __future__ import annotations

import copy
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from headwater.cluster.nodes.schema import connect
from headwater.cluster.nodes.status import ShardStatus, cluster_status
from headwater.cluster.shards import ShardMap
from headwater.stack.replicated_postgres import ReplicatedPostgres
from tests.cluster.nodes.node_network import NodeNetwork
from tests.cluster.nodes.servers import replicated_postgres
from tests.cluster.nodes.spreading import spread_over
from tests.http.certificates import make_certificate
from tests.ports import free_port
from tests.seaweedfs import SeaweedFs, seaweedfs
from tests.serving import Server, serve
from tests.waiting import wait_until

SECRET = "of these tests only"
LEASE_S = 2.0


class RunningCluster:
    """Nodes by number. Each keeps its address when it is started again, on an empty disk."""

    def __init__(
        self,
        postgres: ReplicatedPostgres,
        store: SeaweedFs,
        stack: ExitStack,
        shards: int,
        program: tuple[str, ...],
        *,
        has_networks: bool = False,
    ) -> None:
        self.postgres = postgres
        self.store = store
        self.shards = shards
        self._stack = stack
        self.program = program
        """What nodes run that are started from now on."""
        self._ports: dict[int, int] = {}
        self._has_networks = has_networks
        self.networks: dict[int, NodeNetwork] = {}
        """The connections of each node, which can be cut."""
        self.nodes: dict[int, Server] = {}
        self.settings: dict[str, str] = {}

    def environment(self, number: int) -> dict[str, str]:
        return {
            **self.store.environment,
            "DS_STORAGE__MODE": "cluster",
            "DS_STORAGE__COLD": self.store.url("cluster"),
            "DS_STORAGE__COLD_GRACE_SECS": "5",
            "DS_CLUSTER__POSTGRES_URL": self.postgres.url,
            "DS_CLUSTER__SECRET": SECRET,
            "DS_CLUSTER__SHARDS": str(self.shards),
            "DS_CLUSTER__NODE": f"node-{number}",
            "DS_CLUSTER__LEASE_SECS": str(LEASE_S),
            **self.settings,
        }

    def start(self, number: int) -> Server:
        port = self._ports.setdefault(number, free_port())
        if self._has_networks and number not in self.networks:
            network = NodeNetwork([server.port for server in self.postgres.servers], self.store.endpoint)
            self.networks[number] = self._stack.enter_context(closing(network))
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-node-")))
        environment: dict[str, Any] = self.environment(number)
        if number in self.networks:
            network = self.networks[number]
            environment["DS_CLUSTER__POSTGRES_URL"] = network.postgres_url(self.postgres.url)
            environment["AWS_ENDPOINT_URL"] = network.store.url
        node = self._stack.enter_context(serve(directory=directory, port=port, program=self.program, **environment))
        self.nodes[number] = node
        return node

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self._ports[number]}"

    def processes(self, number: int) -> list[psutil.Process]:
        """All processes of a node, in the order of their start: supervisor, keeper and shards."""
        with suppress(psutil.NoSuchProcess):
            node = psutil.Process(self.nodes[number].pid)
            children = node.children(recursive=True)
            return [node, *sorted(children, key=lambda process: (process.create_time(), process.pid))]
        return []

    def kill(self, number: int) -> None:
        processes = self.processes(number)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):
            self.nodes.pop(number).kill()

    @contextmanager
    def paused(self, number: int) -> Iterator[None]:
        """SIGSTOP for all processes of a node."""
        stopped = self.processes(number)
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in reversed(stopped):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    def owners(self) -> dict[int, str | None]:
        """The node that owns each shard, according to Postgres."""
        with connect(self.postgres.url, "test") as connection:
            rows = connection.execute("SELECT id, owner, address FROM headwater.shard ORDER BY id").fetchall()
        return {
            int(str(shard)): str(owner).partition("#")[0] if owner is not None and address is not None else None
            for shard, owner, address in rows
        }

    def shard(self, shard: int) -> ShardStatus:
        with connect(self.postgres.url, "test") as connection:
            return cluster_status(connection).shards[shard]

    def wait_for_turns(self, count: int) -> None:
        """Until each node has begun and completed this many turns, in which it renews its leases and takes shards."""

        def turns() -> dict[str, int]:
            with connect(self.postgres.url, "test") as connection:
                return dict(connection.execute("SELECT name, beats FROM headwater.node").fetchall())  # type: ignore[arg-type]

        # The current turn may have begun before, and the last one is completed when the next one begins.
        ends = {f"node-{number}": turns()[f"node-{number}"] + count + 1 for number in self.nodes}
        wait_until(turns, lambda now: all(now[name] >= end for name, end in ends.items()), what=f"{count} turns")

    def wait_until_shared(self, *numbers: int) -> None:
        """Until these nodes, and no others, have all shards, each has its part, and all of them answer."""
        names = {f"node-{number}" for number in numbers}
        wait_until(lambda: set(self.owners().values()), lambda owners: owners == names, what=f"shards at {names}")
        for number in numbers:
            wait_until(partial(self._answers, number), what=f"an answer of node-{number}")

    def wait_until_warm(self) -> None:
        """Until every shard has a standby on another node."""

        def warm() -> set[int]:
            with connect(self.postgres.url, "test") as connection:
                return {shard for node in cluster_status(connection).nodes for shard in node.warm}

        wait_until(warm, lambda shards: shards == set(range(self.shards)), what="standbys of all shards")

    def standby_of(self, shard: int) -> str:
        """The node that has the standby of a shard."""
        with connect(self.postgres.url, "test") as connection:
            return next(node.name for node in cluster_status(connection).nodes if shard in node.warm)

    def metric(self, name: str) -> int:
        """The sum of a metric over the processes that run now."""
        text = wait_until(
            lambda: httpx.get(f"{self.url(0)}/metrics"), lambda response: response.status_code == 200, what="metrics"
        ).text
        return sum(int(float(found)) for found in re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE))

    def standby_reads(self) -> int:
        """The reads that standbys have answered for the processes that run now."""
        return self.metric("headwater_standby_reads_total")

    def _answers(self, number: int) -> bool:
        try:
            return httpx.get(f"{self.url(number)}/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    def name_in(self, shard: int, prefix: str = "s") -> str:
        """A stream name that hashes to a shard."""
        shard_map = ShardMap(self.shards, self.shards)
        return next(name for number in range(10_000) if shard_map.shard_of(name := f"{prefix}{number}") == shard)


def link_tls_settings(directory: Path) -> dict[str, str]:
    """Settings with which nodes use TLS between each other, with certificates of a new authority."""
    authority = make_certificate(directory, name="authority")
    node = make_certificate(directory, name="node", issuer=authority)
    return {
        "DS_CLUSTER__TLS_CERT_PATH": str(node.cert_path),
        "DS_CLUSTER__TLS_KEY_PATH": str(node.key_path),
        "DS_CLUSTER__TLS_CA_PATH": str(authority.cert_path),
    }


@contextmanager
def running_cluster(
    settings: Mapping[str, str] | None = None,
    *,
    nodes: int = 3,
    shards: int = 3,
    program: tuple[str, ...] = ("headwater",),
    has_networks: bool = False,
) -> Iterator[RunningCluster]:
    """A cluster whose shards are shared by all nodes when the block is entered.

    With `has_networks`, the connections of each node to Postgres and to the object store can be cut.
    """
    with ExitStack() as stack, ThreadPoolExecutor(nodes + 1) as threads:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-store-")))
        store = threads.submit(lambda: stack.enter_context(seaweedfs(directory)))
        postgres = stack.enter_context(replicated_postgres())
        cluster = RunningCluster(postgres, store.result(), stack, shards, program, has_networks=has_networks)
        cluster.settings.update(settings or {})
        list(threads.map(cluster.start, range(nodes)))
        if nodes:
            cluster.wait_until_shared(*range(nodes))
        yield cluster


@contextmanager
def cluster_as_one_server(settings: Mapping[str, str]) -> Iterator[Server]:
    """Three nodes with one address for tests that know a single server: each connection goes to the next node.

    The leases are longer than a busy machine stops a node. The log is that of the first node.
    """
    changed = {"DS_STORAGE__MODE": "cluster", "DS_CLUSTER__LEASE_SECS": str(3 * LEASE_S)}
    with (
        running_cluster({**settings, **changed}) as cluster,
        spread_over([cluster.url(number) for number in sorted(cluster.nodes)]) as url,
    ):
        server = copy.copy(cluster.nodes[0])
        server.url = url
        yield server
