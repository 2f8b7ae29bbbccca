"""A real cluster: three nodes, three Postgres servers, an object store. What works on one node works on any of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from psycopg.conninfo import make_conninfo

from headwater.cluster.nodes.keeper import open_cluster
from headwater.cluster.nodes.schema import connect
from headwater.config import ClusterSettings, Settings, StorageSettings
from headwater.stack.database import LocalPostgres
from headwater.storage.interface import StorageError
from tests.cluster.nodes.clusters import LEASE_S, SECRET, RunningCluster, link_tls_settings, running_cluster
from tests.cluster.nodes.faults import ENOUGH, FAULTS, endure_faults
from tests.cluster.nodes.faults import SETTINGS as FAULT_SETTINGS
from tests.cluster.nodes.spreading import spread_over
from tests.conformance.test_conformance import DISCOVERED, LONG_POLL_TIMEOUT_SECS, SETTINGS, SUITE
from tests.crash.workload import Violation
from tests.serving import serve, server_environment
from tests.vitest_run import describe_failures, run_vitest
from tests.waiting import wait_until

TEXT = {"Content-Type": "text/plain"}
ROUNDS = 200
STANDBY_READS = {"DS_CLUSTER__STANDBYS": "1", "DS_CLUSTER__STANDBY_READS": "true"}
QUICK_FAULTS = ["cut", "kill_shard", "pause_briefly", "kill_primary", "cut", "stop_store", "kill_node", "pause_node"]
QUICK_FAULTS += ["cut_links", "pause_briefly"]
"""Only two of them wait for the end of a lease: a node is killed, and one is paused for longer than its lease."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, long: bool) -> Iterator[RunningCluster]:
    """Its nodes use TLS between each other, and each has a warm standby of one shard, which serves reads.

    Where no test waits for leases to expire again and again, they are longer than a busy machine stops a node.
    """
    settings = {
        **link_tls_settings(tmp_path_factory.mktemp("certificates")),
        **STANDBY_READS,
        **FAULT_SETTINGS,
        "DS_CLUSTER__LEASE_SECS": str(LEASE_S if long else 3 * LEASE_S),
    }
    with running_cluster(settings, has_networks=True) as running:
        yield running


def urls(cluster: RunningCluster, name: str) -> list[str]:
    return [f"{cluster.url(number)}/v1/stream/{name}" for number in range(3)]


def asked(method: str, url: str, **headers: str) -> httpx.Response:
    """The response to a request that may be repeated. A node that has lost its lease for a moment is asked again."""
    return wait_until(
        lambda: httpx.request(method, url, headers=TEXT | headers),
        lambda response: response.status_code != 503,
        what=f"{method} {url} without 503",
    )


def created(url: str, **headers: str) -> None:
    assert asked("PUT", url, **headers).status_code in {200, 201}


def content_of(url: str) -> bytes:
    return asked("GET", url).content


def appended(url: str, body: bytes, *, once: bool = False) -> None:
    """Append with a client that tries again; `once` as an idempotent producer, which repeats nothing."""
    producer = {"Producer-Id": str(uuid4()), "Producer-Epoch": "0", "Producer-Seq": "0"} if once else {}

    def attempt() -> int | str:
        try:
            return httpx.post(url, content=body, headers=TEXT | producer).status_code
        except httpx.HTTPError as error:
            return repr(error)

    wait_until(attempt, lambda result: result in {200, 204}, what="an append")


def accepted_at_the_second_attempt(first: str, second: str, body: bytes) -> bool:
    """Append with a client that tries again once, as a load balancer sends it."""
    for url in (first, second):
        with suppress(httpx.HTTPError):
            if httpx.post(url, content=body, headers=TEXT, timeout=60).status_code == 204:
                return True
        time.sleep(1)
    return False


@pytest.mark.timeout(480)
def test_any_node_takes_any_request(cluster: RunningCluster) -> None:
    for shard in range(3):
        name = cluster.name_in(shard, f"any{shard}-")
        first, second, third = urls(cluster, name)
        created(first)
        appended(second, b"one;", once=True)
        assert [content_of(url) for url in (first, second, third)] == [b"one;"] * 3
        fork = cluster.name_in((shard + 1) % 3, f"fork{shard}-")
        created(urls(cluster, fork)[2], **{"Stream-Forked-From": f"/v1/stream/{name}"})
        assert content_of(urls(cluster, fork)[0]) == b"one;"


@pytest.mark.timeout(480)
def test_standbys_answer_reads_with_everything_that_was_acknowledged(cluster: RunningCluster) -> None:
    """Also those that were appended through another node. A stream with a TTL is read at its owner."""
    cluster.wait_until_warm()
    shard, owner = next((shard, node) for shard, node in cluster.owners().items() if node is not None)
    standby = cluster.standby_of(shard)
    assert standby != owner
    name = cluster.name_in(shard, "standby-")
    there, here = (f"{cluster.url(int(node[-1]))}/v1/stream/{name}" for node in (owner, standby))
    created(there)
    written = b""
    counted = [f'headwater_requests_total{{operation="{each}",status="200"}}' for each in ("read", "head")]
    before, requests = cluster.standby_reads(), [cluster.metric(name) for name in counted]
    for number in range(50):
        appended(there, b"%d;" % number, once=True)
        written += b"%d;" % number
        assert content_of(here) == written
        assert asked("HEAD", here).headers["Stream-Next-Offset"] == asked("HEAD", there).headers["Stream-Next-Offset"]
    assert cluster.standby_reads() >= before + 90
    # Those that a standby answered, and the owner's.
    assert [cluster.metric(name) >= first + 45 for name, first in zip(counted, requests, strict=True)] == [True, True]
    assert cluster.metric(counted[1]) >= requests[1] + 90
    before = cluster.standby_reads()
    mortal, missing = (f"{here.removesuffix(name)}{cluster.name_in(shard, prefix)}" for prefix in ("ttl-", "missing-"))
    created(mortal, **{"Stream-TTL": "3600"})
    assert asked("GET", mortal).status_code == 200
    assert asked("GET", missing).status_code == 404
    assert cluster.standby_reads() == before


@pytest.mark.timeout(480)
def test_dead_node_loses_nothing_and_drained_one_is_not_missed(cluster: RunningCluster) -> None:
    names = [cluster.name_in(shard, f"kept{shard}-") for shard in range(3)]
    for name in names:
        created(urls(cluster, name)[0])
        appended(urls(cluster, name)[0], b"before;", once=True)
    cluster.wait_until_warm()
    cluster.kill(0)
    for name in names:
        appended(urls(cluster, name)[1], b"without;", once=True)
        assert content_of(urls(cluster, name)[2]) == b"before;without;"
    assert any("the standby takes shard" in cluster.nodes[number].log() for number in (1, 2))
    cluster.start(0)
    cluster.wait_until_shared(0, 1, 2)
    with ThreadPoolExecutor(1) as threads:
        left = threads.submit(cluster.nodes.pop(1).stop)
        while not left.done():
            for name in names:
                first, leaving, last = urls(cluster, name)
                assert accepted_at_the_second_attempt(last, last, b"during the drain;")
                assert accepted_at_the_second_attempt(leaving, first, b"during the drain;")
    assert left.result() == 0
    cluster.wait_until_shared(0, 2)
    for name in names:
        assert content_of(urls(cluster, name)[0]).startswith(b"before;without;")
    cluster.start(1)
    cluster.wait_until_shared(0, 1, 2)


@pytest.mark.timeout(480)
def test_requests_get_503_while_postgres_has_no_standby(cluster: RunningCluster) -> None:
    name = cluster.name_in(0, "alone-")
    first, second, _ = urls(cluster, name)
    created(first)
    appended(second, b"before;")
    postgres = cluster.postgres
    standbys = [server for number, server in enumerate(postgres.servers) if number != postgres.primary]
    for server in standbys:
        server.kill()

    def refused() -> httpx.Response | None:
        try:
            return httpx.post(first, content=b"not certain;", headers=TEXT, timeout=60)
        except httpx.HTTPError:
            return None

    answer = wait_until(refused, lambda each: each is not None and each.status_code == 503, what="503")
    assert answer is not None
    assert answer.headers["Retry-After"] == "1"
    postgres.watch()
    appended(second, b"after;")
    # The node may have no shards yet.
    content = content_of(first)
    assert content.startswith(b"before;")
    assert content.endswith(b"after;")
    cluster.wait_until_shared(0, 1, 2)


def headwater(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "headwater", *arguments]
    done = subprocess.run(
        command, env=server_environment(**environment), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(480)
def test_cluster_is_checked_and_copied_into_a_directory_and_from_there_into_another_cluster(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    names = [cluster.name_in(shard, f"copied{shard}-") for shard in range(3)]
    for name in names:
        assert httpx.put(urls(cluster, name)[0], headers=TEXT).status_code == 201
        appended(urls(cluster, name)[0], f"of {name};".encode())
    environment = cluster.environment(0)
    assert "all checksums and indexes are correct" in headwater(environment, "store", "check")
    found = json.loads(headwater(environment, "store", "stats", "--format", "json"))
    assert found["streams"] >= len(names)
    directory = tmp_path / "data"
    headwater(environment, "store", "copy", "--to-mode", "file-durable", "--to-dir", str(directory))
    with connect(cluster.postgres.url, "test") as connection:
        connection.execute("CREATE DATABASE other")
    other: dict[str, Any] = {
        **environment,
        "DS_CLUSTER__POSTGRES_URL": make_conninfo(cluster.postgres.url, dbname="other"),
        "DS_STORAGE__COLD": cluster.store.url("other"),
    }
    source = ("--from-mode", "file-durable", "--from-dir", str(directory))
    assert "compared" in headwater(other, "store", "copy", *source, "--to-mode", "cluster")
    with serve(**other) as node:
        for name in names:
            answer = wait_until(
                lambda name=name: httpx.get(f"{node.url}/v1/stream/{name}"),  # type: ignore[misc]
                lambda answer: answer.status_code == 200,
                what="the shard",
            )
            assert answer.content == f"of {name};".encode()
            appended(f"{node.url}/v1/stream/{name}", b"more;")


@pytest.mark.timeout(600)
def test_ten_quick_faults_break_no_promise(cluster: RunningCluster) -> None:
    check_faults(cluster, QUICK_FAULTS, time.time_ns() % 10**9)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_fault_breaks_a_promise(cluster: RunningCluster) -> None:
    seed = time.time_ns() % 10**9
    check_faults(cluster, random.Random(seed).choices(list(FAULTS), k=ROUNDS), seed)


def check_faults(cluster: RunningCluster, faults: list[str], seed: int) -> None:
    counts = asyncio.run(endure_faults(cluster, faults, seed))
    for what in ("append", "read", "tail", "create", "delete", "events"):
        assert counts[what] > len(faults), f"too little {what} to judge by: {counts}"
    for what, each in ENOUGH.items():
        assert counts[what] >= each * len(faults), f"too little {what} to judge by: {counts}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nodes_of_two_versions_work_together_and_the_older_ones_leave_newer_shards_alone() -> None:
    # No lease expires: a shard that the newer node took over for a moment could not be returned to an older one.
    with running_cluster({"DS_CLUSTER__LEASE_SECS": str(3 * LEASE_S)}, nodes=2) as cluster:
        names = [cluster.name_in(shard) for shard in range(3)]
        for name in names:
            assert httpx.put(f"{cluster.url(0)}/v1/stream/{name}", headers=TEXT).status_code == 201
            appended(f"{cluster.url(1)}/v1/stream/{name}", b"before;")
        cluster.program = ("tests.cluster.nodes.newer",)
        cluster.start(2)
        cluster.wait_until_shared(0, 1, 2)
        (newer,) = [shard for shard, node in cluster.owners().items() if node == "node-2"]
        for number in range(3):
            for name in names:
                appended(f"{cluster.url(number)}/v1/stream/{name}", b"%d;" % number)
        # It leaves, and what it has written is left to nodes that can read it.
        assert cluster.nodes.pop(2).stop() == 0
        others = [name for shard, name in enumerate(names) if shard != newer]
        for name in others:
            appended(f"{cluster.url(0)}/v1/stream/{name}", b"without;")
        # A shard that was handed over is free at once.
        left = cluster.shard(newer)
        cluster.wait_for_turns(2)
        found = cluster.shard(newer)
        assert (left.owner, found.owner, found.epoch) == (None, None, left.epoch)
        # The upgrade is completed.
        for number in (0, 1):
            assert cluster.nodes.pop(number).stop() == 0
            cluster.start(number)
        cluster.wait_until_shared(0, 1)
        for name in names:
            tail = b"without;" if name in others else b""
            assert httpx.get(f"{cluster.url(1)}/v1/stream/{name}").content == b"before;0;1;2;" + tail


@pytest.mark.long
@pytest.mark.timeout(600)
def test_reads_of_a_former_owner_are_found_by_the_history() -> None:
    """The broken variant: without the lease, a paused owner answers from a past that others have left."""
    program = ("tests.cluster.nodes.broken", "reads_without_a_lease")
    with running_cluster(program=program) as cluster, pytest.raises(Violation):
        asyncio.run(endure_faults(cluster, ["pause_node"] * 12, 5))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_reads_of_a_stale_standby_are_found_by_the_history() -> None:
    """The broken variant: a standby that takes a shard over answers from what it happens to have."""
    program = ("tests.cluster.nodes.broken", "answers_from_a_stale_standby")
    with running_cluster({"DS_CLUSTER__STANDBYS": "2"}, program=program) as cluster:
        cluster.wait_until_warm()
        with pytest.raises(Violation):
            asyncio.run(endure_faults(cluster, ["kill_node"] * 12, 5))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_reads_of_a_standby_that_does_not_ask_the_owner_are_found_by_the_history() -> None:
    program = ("tests.cluster.nodes.broken", "answers_reads_without_asking")
    with running_cluster(STANDBY_READS, program=program) as cluster:
        cluster.wait_until_warm()
        with pytest.raises(Violation):
            asyncio.run(endure_faults(cluster, ["cut"] * 12, 5))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_lost_commits_that_could_be_read_are_found_by_the_history() -> None:
    """The broken variant: a row that can be read on the primary may be on no standby yet."""
    program = ("tests.cluster.nodes.broken", "acknowledges_what_it_can_read")
    with running_cluster(program=program) as cluster, pytest.raises(Violation):
        asyncio.run(endure_faults(cluster, ["lose_primary"] * 12, 5))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("serves_reads", [False, True])
def test_official_suite_passes_with_its_requests_spread_over_the_nodes(tmp_path: Path, serves_reads: bool) -> None:
    """Also with TLS between the nodes, and with standbys that serve reads."""
    settings = {**link_tls_settings(tmp_path), **STANDBY_READS} if serves_reads else {}
    with (
        running_cluster({**SETTINGS, **settings}) as cluster,
        spread_over([cluster.url(number) for number in range(3)]) as url,
    ):
        if serves_reads:
            cluster.wait_until_warm()
        cases = run_vitest(
            SUITE,
            env={
                "CONFORMANCE_URL": url,
                "CONFORMANCE_LONG_POLL_TIMEOUT_MS": str(LONG_POLL_TIMEOUT_SECS * 1000),
            },
            timeout_secs=300,
        )
        assert bool(cluster.standby_reads()) == serves_reads
    assert len(cases) == DISCOVERED
    assert not [case for case in cases if case.status == "failed"], describe_failures(cases)


def settings_of(single: LocalPostgres, **cluster: object) -> Settings:
    given = {"postgres_url": single.url, "secret": SECRET, "name": "test", **cluster}
    return Settings(
        storage=StorageSettings(mode="cluster", cold="s3://nowhere/prefix"),
        cluster=ClusterSettings.model_validate(given),
    )


@pytest.mark.parametrize(
    ("cluster_settings", "reason"),
    [
        ({}, "synchronous_standby_names is empty"),
        ({"require_standby": False, "name": "other"}, "belongs to the cluster 'test'"),
        ({"postgres_url": "postgresql://127.0.0.1:1/none"}, "cluster.postgres_url cannot be used"),
        ({"secret": ""}, "needs cluster.postgres_url, cluster.secret and storage.cold"),
    ],
)
def test_node_refuses_what_could_not_keep_its_promises(
    single: LocalPostgres, cluster_settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(StorageError, match=re.escape(reason)):
        open_cluster(settings_of(single, **cluster_settings))


def test_refusal_is_what_the_command_reports(single: LocalPostgres) -> None:
    environment = server_environment(
        DS_STORAGE__MODE="cluster",
        DS_STORAGE__COLD="s3://nowhere/prefix",
        DS_CLUSTER__SECRET=SECRET,
        DS_CLUSTER__POSTGRES_URL=single.url,
    )
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0"]
    node = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert node.returncode == 1
    assert "synchronous_standby_names is empty" in node.stderr
