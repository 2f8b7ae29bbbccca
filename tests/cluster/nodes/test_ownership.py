"""Who owns which shard: several nodes at one real Postgres, with clocks that the test moves."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from headwater.cli import command_line
from headwater.cluster import messages
from headwater.cluster.nodes.node_worker import NodeWorker
from headwater.cluster.nodes.ownership import HELD_PART, NameInUseError, Ownership, Standing, Turn
from headwater.cluster.nodes.schema import Connection, connect, create_tables
from headwater.cluster.nodes.status import cluster_status
from headwater.cluster.shards import ShardMap
from headwater.config import Settings
from headwater.http.server import Reloader
from headwater.stack.database import LocalPostgres
from tests.postgres.databases import database
from tests.waiting import LIMIT_S

SHARDS = 6
LEASE_S = 3.0


@pytest.fixture(scope="module")
def running() -> Iterator[LocalPostgres]:
    with database() as postgres:
        with connect(postgres.url, "test") as connection:
            create_tables(connection, "test", SHARDS)
        yield postgres


@pytest.fixture
def connection(running: LocalPostgres) -> Iterator[Connection]:
    with connect(running.url, "test") as opened:
        opened.execute("DELETE FROM headwater.node")
        opened.execute("UPDATE headwater.shard SET owner = NULL, address = NULL, format = 1")
        yield opened


class Node:
    """A node that makes its turns when the test says so."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        *,
        format_version: int = 1,
        standbys: int = 0,
        lease_s: float = LEASE_S,
        start: int = 1,
    ) -> None:
        self.now_s = 100.0
        self._connection = connection
        self._ownership = Ownership(
            name,
            f"{name}#{start}",
            "127.0.0.1:1",
            lease_s,
            require_standby=False,
            format_version=format_version,
            standbys=standbys,
            clock=lambda: self.now_s,
            wall_clock=lambda: time.time() + self.ahead_s,
        )
        self.ahead_s = 0.0
        self.standing = Standing({}, 0.0, {})
        self.now_s += lease_s  # At first a new node only observes the others.

    def turn(
        self,
        *,
        reopen: tuple[int, ...] = (),
        release: tuple[int, ...] = (),
        takes: bool = True,
        warm: tuple[int, ...] = (),
    ) -> Standing:
        addresses = {shard: f"10.0.0.1:{shard}" for shard in self.standing.held if shard not in release}
        self.standing = self._ownership.turn(self._connection, Turn(addresses, reopen, release, takes, warm))
        assert not self.standing.problem
        return self.standing

    @property
    def shards(self) -> set[int]:
        return set(self.standing.held)


def test_one_node_has_all_shards_and_hands_half_of_them_to_the_second(connection: Connection) -> None:
    first, second = Node(connection, "a"), Node(connection, "b")
    assert set(first.turn().held) == set(range(SHARDS))
    assert second.turn().held == {}
    assert first.turn().surplus == SHARDS // 2
    for shard in (5, 4, 3):
        first.turn(release=(shard,))
        second.turn()
    assert first.turn().surplus == 0
    assert first.shards == {0, 1, 2}
    assert second.shards == {3, 4, 5}
    assert second.turn().owners[0][1] == "10.0.0.1:0"


def test_silent_node_loses_its_shards_after_a_lease_and_not_before(connection: Connection) -> None:
    silent, other = Node(connection, "a"), Node(connection, "b")
    held = silent.turn().held
    other.turn()
    other.now_s += LEASE_S * 0.99
    assert other.turn().held == {}
    assert silent.standing.until_s <= silent.now_s + HELD_PART * LEASE_S
    other.now_s += LEASE_S * 0.02
    taken = other.turn().held
    assert taken == {shard: epoch + 1 for shard, epoch in held.items()}
    assert silent.turn().held == {}, "it learns of it in its next turn"


def test_renewed_lease_is_not_taken_whatever_the_clocks_say(connection: Connection) -> None:
    busy, other = Node(connection, "a"), Node(connection, "b")
    busy.turn()
    other.turn()
    busy.now_s -= 1e6
    for _ in range(5):
        other.now_s += LEASE_S * 0.9
        assert busy.turn().held
        assert other.turn().held == {}


@pytest.mark.parametrize("is_known_from", ["the row of the shard", "the report"])
def test_shard_of_an_owner_with_longer_leases_is_left_to_it_for_their_length(
    connection: Connection, is_known_from: str
) -> None:
    """As while `cluster.lease_secs` is changed on one node after the other. An earlier version has it in its report
    alone, and a node that started again replaces the report."""
    silent, other = Node(connection, "a", lease_s=4 * LEASE_S), Node(connection, "b")
    silent.turn()
    assert len(silent.turn().held) == SHARDS
    silent.now_s = other.now_s
    until_s = silent.turn().until_s
    assert until_s > other.now_s + 3 * LEASE_S
    if is_known_from == "the report":
        connection.execute("UPDATE headwater.shard SET lease_s = 0")
    else:
        connection.execute("UPDATE headwater.node SET report = '{}', incarnation = 'a#2' WHERE name = 'a'")
    other.turn()
    while other.now_s <= until_s:
        assert other.turn().held == {}, f"{until_s - other.now_s} s before the owner stops to rely on its lease"
        other.now_s += LEASE_S / 6
    other.now_s += LEASE_S
    assert other.turn().held


def test_node_with_shorter_leases_counts_one_with_longer_ones_as_alive(connection: Connection) -> None:
    """Although it renews them less often."""
    slow, fast = Node(connection, "a", lease_s=10 * LEASE_S), Node(connection, "b")
    fast.turn()
    slow.turn()
    fast.turn()
    assert fast.turn().surplus == SHARDS // 2
    fast.now_s += 1.5 * LEASE_S
    assert fast.turn().surplus == SHARDS // 2
    fast.now_s += 10 * LEASE_S
    assert fast.turn().surplus == 0


@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_second_node_of_a_name_ends_and_the_first_one_keeps_its_shards(connection: Connection, slower: float) -> None:
    first, second = Node(connection, "a", lease_s=slower * LEASE_S), Node(connection, "a", start=2)
    held = first.turn().held

    def run_both() -> None:
        for number in range(int(12 * slower)):
            assert second.turn().held == {}
            second.now_s += LEASE_S / 6
            if number % slower == 0:
                first.turn()

    with pytest.raises(NameInUseError, match=r"has the name 'a'\. Give each node its own cluster\.node"):
        run_both()
    assert first.turn().held == held


def test_node_that_starts_again_takes_its_name_over(connection: Connection) -> None:
    """Also if a statement of its former process, which was killed, is carried out late, or if that was only paused."""
    former, node = Node(connection, "a"), Node(connection, "a", start=2)
    former.turn()
    node.turn()
    former.turn()
    for _ in range(6):
        node.now_s += LEASE_S / 6
        node.turn()
    node.now_s += LEASE_S / 6
    held = node.turn().held
    assert held.keys() == set(range(SHARDS))
    for _ in range(3):
        assert former.turn().held == {}
        assert node.turn().held == held


def test_lease_ends_while_the_machine_is_suspended(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """`time.monotonic` does not run then, and the shard may have another owner afterwards."""
    suspended_s = 1e5
    read = time.clock_gettime
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: read(clock) + (suspended_s if clock == time.CLOCK_BOOTTIME else 0.0)
    )
    standing = Ownership("a", "a#1", "127.0.0.1:1", 60.0, require_standby=False).turn(connection, Turn({}))
    assert standing.until_s > read(time.CLOCK_BOOTTIME) + suspended_s
    settings, (control, ended) = Settings(), messages.pair()
    lease = messages.ShardLease(standing.until_s, {})
    worker = NodeWorker(
        settings, Reloader(lambda: settings), 0, ShardMap(1, 1), [ended], control, epoch=1, lease=lease, host=""
    )
    assert worker._is_ours()
    suspended_s += 60.0
    assert not worker._is_ours()
    control.close()
    ended.close()


def test_difference_of_clocks_is_reported_and_changes_nothing(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(connection, "a")
    held = node.turn().held
    node.ahead_s = -3600.0
    assert node.turn().held == held
    assert "the clock of this machine is -3" in caplog.text
    (status,) = cluster_status(connection, require_standby=False).nodes
    assert -3610 < status.clock_ahead_s < -3590


def test_node_that_no_longer_renews_its_leases_is_shown_as_such(
    connection: Connection, running: LocalPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the state shows it: who owns a shard does not depend on this time."""
    dead, alive = Node(connection, "a"), Node(connection, "b")
    dead.turn()
    connection.execute(
        "UPDATE headwater.node SET report = report || jsonb_build_object('at_s', (report->>'at_s')::float8 - 10)"
    )
    alive.turn()
    shown = {node.name: node for node in cluster_status(connection, require_standby=False).nodes}
    assert not shown["a"].responds
    assert 10 <= shown["a"].silent_s < 10 + LIMIT_S
    assert shown["b"].silent_s < LIMIT_S
    monkeypatch.setenv("DS_CLUSTER__POSTGRES_URL", running.url)
    lines = CliRunner().invoke(command_line(), ["cluster", "status"]).stdout.splitlines()
    assert lines[0].startswith("cluster test: 2 nodes (")
    assert "6 shards, has not responded for " in next(line for line in lines if line.startswith("node a "))
    connection.execute("UPDATE headwater.node SET report = report - 'at_s'")
    nodes = cluster_status(connection, require_standby=False).nodes
    assert [(node.silent_s, node.responds) for node in nodes] == [(0.0, True)] * 2, "nodes of an earlier version"


def test_process_that_died_gets_another_epoch(connection: Connection) -> None:
    node = Node(connection, "a")
    before = node.turn().held[2]
    assert node.turn(reopen=(2,)).held[2] == before + 1


def test_draining_node_takes_nothing_and_hands_everything_over(connection: Connection) -> None:
    node, other = Node(connection, "a"), Node(connection, "b")
    node.turn()
    assert node.turn(takes=False).surplus == SHARDS
    other.turn()
    node.turn(release=tuple(node.shards), takes=False)
    assert node.turn(takes=False).held == {}
    assert len(other.turn().held) == SHARDS, "a node that leaves has no share"


def test_shard_of_a_later_version_is_left_to_nodes_that_can_read_it(connection: Connection) -> None:
    newer = Node(connection, "new", format_version=2)
    newer.turn()
    older, other = Node(connection, "old"), Node(connection, "newer", format_version=2)
    newer.turn(release=tuple(newer.shards), takes=False)
    assert older.turn().held == {}
    assert set(other.turn().held)


def shared(*nodes: Node) -> None:
    """Until the nodes share the shards evenly."""
    for _ in range(2 * SHARDS):
        for node in nodes:
            standing = node.turn()
            if standing.surplus:
                node.turn(release=(max(node.shards),))


def test_standbys_of_three_nodes_cover_all_shards_and_never_their_own(connection: Connection) -> None:
    nodes = [Node(connection, name, standbys=SHARDS // 3) for name in "abc"]
    shared(*nodes)
    assert [len(node.shards) for node in nodes] == [2, 2, 2]
    standbys = [set(node.turn().standbys) for node in nodes]
    for node, kept in zip(nodes, standbys, strict=True):
        assert len(kept) == SHARDS // 3
        assert not kept & node.shards
    assert set().union(*standbys) == set(range(SHARDS))
    assert nodes[0].turn(takes=False).standbys == ()


def test_node_with_a_standby_takes_the_shard_and_the_others_leave_it_to_it(connection: Connection) -> None:
    silent, warm, cold = (Node(connection, name, standbys=SHARDS) for name in "abc")
    shared(silent, warm, cold)
    (first, second) = sorted(silent.shards)
    for _ in range(2):
        warm.turn(warm=(second,))
        cold.turn()
        for node in (warm, cold):
            node.now_s += LEASE_S * 0.55
    # Both know that the node is gone, and each has room for one more.
    assert cold.turn().held.keys() & {first, second} == {first}
    assert warm.turn(warm=(second,)).held.keys() & {first, second} == {second}


def test_standby_that_does_not_take_its_shard_does_not_keep_others_from_it(connection: Connection) -> None:
    silent, warm, cold = (Node(connection, name, standbys=SHARDS) for name in "abc")
    shared(silent, warm, cold)
    lost = silent.shards
    for _ in range(4):
        warm.turn(takes=True, warm=tuple(lost))
        warm.standing = Standing(
            {shard: epoch for shard, epoch in warm.standing.held.items() if shard not in lost}, 0, {}
        )
        cold.turn()
        cold.now_s += LEASE_S * 0.5
    assert cold.turn().held.keys() & lost
