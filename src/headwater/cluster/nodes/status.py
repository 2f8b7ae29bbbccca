"""The state of a cluster, read from its tables in Postgres."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.cluster.nodes.schema import Connection, broken_promise


class NodeStatus(msgspec.Struct, frozen=True):
    name: str
    address: str
    shards: int
    """The number of shards that it owns."""
    leaves: bool
    """Whether it drains."""
    warm: list[int]
    """The shards of other nodes of which it has a warm standby."""
    clock_ahead_s: float
    """By how much its clock is ahead of that of Postgres."""
    silent_s: float
    """How long ago it renewed its leases, by the clock of Postgres."""
    responds: bool
    """Whether that is less than the length of a lease: otherwise the node is dead, paused or cut off."""


class ShardStatus(msgspec.Struct, frozen=True):
    id: int
    owner: str | None
    epoch: int
    seq: int
    """The last record that was committed."""
    is_serving: bool
    journal_batches: int
    """Batches that the object store does not have yet."""
    journal_bytes: int


class ClusterStatus(msgspec.Struct, frozen=True):
    id: str
    name: str
    nodes: list[NodeStatus]
    shards: list[ShardStatus]
    problem: str | None
    """Why Postgres does not meet the requirements of the cluster, or None."""

    @property
    def is_whole(self) -> bool:
        return self.problem is None and all(shard.is_serving for shard in self.shards)


def cluster_status(connection: Connection, *, require_standby: bool = True) -> ClusterStatus:
    """Read the state. Raises `psycopg.Error` if there is no cluster in this database."""
    identity: Any = connection.execute("SELECT id, name FROM headwater.cluster").fetchone()
    shards: Any = connection.execute(
        "SELECT shard.id, owner, epoch, seq, address IS NOT NULL, batches, bytes FROM headwater.shard"
        " LEFT JOIN LATERAL (SELECT count(*) AS batches, COALESCE(sum(length(batch)), 0)::bigint AS bytes"
        " FROM headwater.journal WHERE journal.shard = shard.id) AS unsaved ON true ORDER BY shard.id"
    ).fetchall()
    nodes: Any = connection.execute(
        "SELECT name, address, (SELECT count(*) FROM headwater.shard WHERE owner = incarnation),"
        " COALESCE((report->>'leaves')::boolean, false), COALESCE(report->'warm', '[]'),"
        " COALESCE((report->>'clock_ahead_s')::float8, 0), round(silent.s::numeric, 1)::float8,"
        " silent.s <= COALESCE((report->>'lease_s')::float8, silent.s)"
        " FROM headwater.node, LATERAL (SELECT GREATEST(0, COALESCE("
        "extract(epoch FROM clock_timestamp())::float8 - (report->>'at_s')::float8, 0)) AS s) AS silent ORDER BY name"
    ).fetchall()
    return ClusterStatus(
        identity[0] if identity else "",
        identity[1] if identity else "",
        [NodeStatus(*row) for row in nodes],
        [ShardStatus(row[0], row[1].partition("#")[0] if row[1] else None, *row[2:]) for row in shards],
        broken_promise(connection, require_standby=require_standby),
    )
