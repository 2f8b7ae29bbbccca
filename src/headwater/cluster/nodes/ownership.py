"""The ownership of shards: in regular turns, a node renews its leases and takes or releases shards.

In each turn a node raises the lease of its shards by one, looks at those of the others, and takes shards that are free,
or whose lease did not move for its length by the clock of this node. The length is the setting of the owner, or that of
this node if it is longer: they differ while `cluster.lease_secs` is changed on one node after the other. The nodes that
are alive share the shards evenly: who has more than its share hands some over.

A node has one row, under its name. One that starts replaces the row of an earlier start. If that comes back, the former
process still runs, so two nodes have been given this name, and the one that started last ends.

Every start of a shard's process is a new epoch, and no two processes ever have the same one. For this, an epoch counts
only once a standby has it: otherwise it could be lost with the primary and be given out a second time. So an epoch is
taken under the condition that Postgres replicates synchronously. A turn with a warning, one whose connection broke, and
one during which Postgres read its settings again or stopped to replicate, give nothing. What such a turn may have taken
stands still then, and is free after a lease.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import psycopg
from psycopg.types.json import Jsonb

from headwater.cluster.nodes.schema import FORMAT, SETTINGS_READ, SYNCHRONOUS, Connection, broken_promise
from headwater.operating_system import SYSTEM
from headwater.storage.interface import StorageError

log = logging.getLogger("headwater.cluster")

HELD_PART: Final = 0.9
"""A node relies on a lease for this fraction of its time, because clocks may run at slightly different speeds."""
OBSERVE_PART: Final = 0.4
"""A new node only observes for this fraction of a lease, so that nodes that start together find each other."""

CLOCK_S: Final = 1.0
"""A larger difference between clocks is logged. Leases do not depend on it; TTLs and times of arrival do."""
FORMER_TURNS: Final = 2
"""How often the row of an earlier start must come back: the last statement of a node that died may be carried out
late."""
DEFER_PART: Final = 0.5
"""How much longer a node waits, as a fraction of a lease, before it takes a shard of which another has a standby."""

_RENEW: Final = """
WITH beat AS (
    INSERT INTO headwater.node (name, incarnation, address, report)
    VALUES (%(node)s, %(owner)s, %(address)s,
        %(report)s || jsonb_build_object('at_s', extract(epoch FROM clock_timestamp())))
    ON CONFLICT (name) DO UPDATE SET beats = node.beats + 1, incarnation = EXCLUDED.incarnation,
        address = EXCLUDED.address, report = EXCLUDED.report
), given AS (
    SELECT * FROM unnest(%(shards)s::integer[], %(addresses)s::text[]) AS given (id, address)
)
UPDATE headwater.shard SET lease = lease + 1, lease_s = %(lease_s)s, address = given.address
FROM given WHERE shard.id = given.id AND shard.owner = %(owner)s RETURNING shard.id, shard.epoch
"""
_RELEASE: Final = """
UPDATE headwater.shard SET owner = NULL, address = NULL, lease = lease + 1
WHERE id = ANY(%(shards)s) AND owner = %(owner)s
"""
_REOPEN: Final = """
UPDATE headwater.shard SET epoch = epoch + 1, lease = lease + 1, address = NULL
WHERE id = ANY(%(shards)s) AND owner = %(owner)s {}
RETURNING id, epoch
"""
_TAKE: Final = """
UPDATE headwater.shard SET epoch = shard.epoch + 1, owner = %(owner)s, lease = shard.lease + 1,
    lease_s = %(lease_s)s, address = NULL, format = GREATEST(format, %(format)s)
FROM unnest(%(shards)s::integer[], %(epochs)s::bigint[], %(leases)s::bigint[]) AS seen (id, epoch, lease)
WHERE shard.id = seen.id AND shard.epoch = seen.epoch AND shard.lease = seen.lease AND shard.format <= %(format)s {}
RETURNING shard.id, shard.epoch
"""


class Turn(msgspec.Struct, frozen=True, tag="turn"):
    """The request of a node's supervisor for one turn."""

    addresses: dict[int, str]
    """The shards that it has, and where their processes listen; empty while one is starting."""
    reopen: tuple[int, ...] = ()
    """Shards whose process died: they need another epoch."""
    release: tuple[int, ...] = ()
    takes: bool = True
    """Whether it takes shards: not while it drains."""
    warm: tuple[int, ...] = ()
    """Shards that it can take over without loading them, because it has a standby."""


class Standing(msgspec.Struct, frozen=True, tag="standing"):
    """The state of a node after a turn."""

    held: dict[int, int]
    """Its shards, and their epochs."""
    until_s: float
    """The time until which it may rely on that, by the clock `SYSTEM.elapsed_s` of the machine."""
    owners: dict[int, tuple[int, str]]
    """The epoch and the address of every shard that can be reached."""
    surplus: int = 0
    """The number of shards that it should hand over."""
    standbys: tuple[int, ...] = ()
    """The shards of others that it should keep a standby of."""
    problem: str = ""
    """Why the turn failed; the other fields are then not valid."""


class _Row(NamedTuple):
    id: int
    epoch: int
    owner: str | None
    lease: int
    address: str | None
    format: int
    lease_s: float


class NameInUseError(StorageError):
    """Another node that runs has the name of this one."""


class Ownership:
    def __init__(
        self,
        node: str,
        owner: str,
        address: str,
        lease_s: float,
        *,
        require_standby: bool = True,
        standbys: int = 0,
        format_version: int = FORMAT,
        clock: Callable[[], float] = SYSTEM.elapsed_s,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._node = node
        self._owner = owner
        self._address = address
        self._lease_s = lease_s
        self._require_standby = require_standby
        self._standbys_max = standbys
        condition = SYNCHRONOUS if require_standby else ""
        self._reopen_statement = _REOPEN.format(condition)
        self._take_statement = _TAKE.format(condition)
        self._format = format_version
        self._clock = clock
        self._wall_clock = wall_clock
        self._clock_ahead_s = 0.0
        self._takes_from_s = clock() + OBSERVE_PART * lease_s
        self._seen: dict[object, tuple[object, float]] = {}
        """For each shard and node: its last value, and when the change to it was seen."""
        self._has_looked = False
        self._former: str | None = None
        """The start of a node of this name that was there before this one."""
        self._former_until_s = 0.0
        self._former_turns = 0
        self._reported_s: dict[str, float] = {}
        """The length of the leases of each start of a node."""
        self._is_warned = False

    def watch(self, connection: Connection) -> None:
        """Note the warnings of this connection: a commit that may not be replicated is not a lease."""
        connection.add_notice_handler(self._on_notice)

    def turn(self, connection: Connection, wanted: Turn) -> Standing:
        settings_read = connection.execute(SETTINGS_READ).fetchone()
        problem = broken_promise(connection, require_standby=self._require_standby)
        if problem is not None:
            return Standing({}, 0.0, {}, problem=f"Postgres cannot be used: {problem}")
        self._is_warned = False
        self._check_name(connection)
        if wanted.release:
            connection.execute(_RELEASE, {"owner": self._owner, "shards": list(wanted.release)})
        started_s = self._clock()
        renewed = [shard for shard in wanted.addresses if shard not in (*wanted.reopen, *wanted.release)]
        held = self._epochs(
            connection,
            _RENEW,
            node=self._node,
            lease_s=self._lease_s,
            address=self._address,
            report=Jsonb(
                {
                    "shards": sorted(wanted.addresses),
                    "leaves": not wanted.takes,
                    "warm": list(wanted.warm),
                    "clock_ahead_s": self._measured_clock(connection),
                    "lease_s": self._lease_s,
                }
            ),
            shards=renewed,
            addresses=[wanted.addresses[shard] or None for shard in renewed],
        )
        if wanted.reopen:
            held |= self._epochs(connection, self._reopen_statement, shards=list(wanted.reopen))
        rows = [
            _Row(*row)  # type: ignore[arg-type]
            for row in connection.execute(
                "SELECT id, epoch, owner, lease, address, format, lease_s FROM headwater.shard ORDER BY id"
            ).fetchall()
        ]
        others = self._others(connection)
        share = math.ceil(len(rows) / (1 + len(others)))
        warm_elsewhere = set().union(*others.values()) - set(wanted.warm)
        free = [
            row for row in rows if row.id not in held and self._is_free(row, is_warm_elsewhere=row.id in warm_elsewhere)
        ]
        free.sort(key=lambda row: row.id not in wanted.warm)
        if wanted.takes and len(held) < share and free and self._clock() >= self._takes_from_s:
            taken = free[: share - len(held)]
            held |= self._epochs(
                connection,
                self._take_statement,
                format=self._format,
                lease_s=self._lease_s,
                shards=[row.id for row in taken],
                epochs=[row.epoch for row in taken],
                leases=[row.lease for row in taken],
            )
        if self._is_warned:
            return Standing({}, 0.0, {}, problem="a lease may not be replicated")
        problem = self._problem_since(connection, settings_read)
        if problem is not None:
            return Standing({}, 0.0, {}, problem=problem)
        owners = {row.id: (row.epoch, row.address) for row in rows if row.address is not None}
        surplus = max(0, len(held) - share) if wanted.takes else len(held)
        standbys = self._standbys(rows, held, set(others), set(wanted.warm)) if wanted.takes else ()
        return Standing(held, started_s + HELD_PART * self._lease_s, owners, surplus, standbys)

    def _check_name(self, connection: Connection) -> None:
        """Raise `NameInUseError` if a node that was there before this one renews its leases under the same name."""
        row: Any = connection.execute(
            "SELECT incarnation, COALESCE((report->>'lease_s')::float8, 0) FROM headwater.node WHERE name = %s",
            [self._node],
        ).fetchone()
        found, lease_s = (None, 0.0) if row is None else row
        if not self._has_looked:
            self._has_looked = True
            self._former = found
            self._former_until_s = self._clock() + max(self._lease_s, lease_s)
        elif found == self._former is not None and self._clock() < self._former_until_s:
            self._former_turns += 1
            if self._former_turns >= FORMER_TURNS:
                raise NameInUseError(
                    f"Another node of the cluster has the name {self._node!r}. Give each node its own cluster.node."
                )

    def _problem_since(self, connection: Connection, settings_read: tuple[object, ...] | None) -> str | None:
        """Why what was committed since the settings were read may not be replicated: a commit that waits for a standby
        also returns when there is none any more to wait for, without a warning."""
        problem = broken_promise(connection, require_standby=self._require_standby)
        if problem is not None:
            return f"Postgres cannot be used: {problem}"
        if self._require_standby and connection.execute(SETTINGS_READ).fetchone() != settings_read:
            return "Postgres has read its settings again meanwhile"
        return None

    def _measured_clock(self, connection: Connection) -> float:
        """By how much the clock of this machine is ahead of that of Postgres. It is reported, and decides nothing."""
        before_s = self._wall_clock()
        row: Any = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
        ahead_s: float = round((before_s + self._wall_clock()) / 2 - row[0], 3)
        if (abs(ahead_s) > CLOCK_S) != (abs(self._clock_ahead_s) > CLOCK_S):
            log.warning("the clock of this machine is %g s ahead of that of Postgres", ahead_s)
        self._clock_ahead_s = ahead_s
        return ahead_s

    def leave(self, connection: Connection) -> None:
        """Remove the node when it ends, so that others do not wait for it."""
        connection.execute("DELETE FROM headwater.node WHERE name = %s AND incarnation = %s", [self._node, self._owner])

    def _epochs(self, connection: Connection, statement: str, **values: object) -> dict[int, int]:
        rows = connection.execute(statement, {"owner": self._owner, **values}).fetchall()
        return {int(str(shard)): int(str(epoch)) for shard, epoch in rows}

    def _is_free(self, row: _Row, *, is_warm_elsewhere: bool) -> bool:
        """Whether this node may take a shard; a moment later if another one has a standby of it."""
        if row.format > self._format:
            return False  # Written by a later version, which this one cannot read.
        # A node of an earlier version writes the length of its leases only into its report.
        still_s = 0.0 if row.owner is None else max(self._lease_s, row.lease_s, self._reported_s.get(row.owner, 0.0))
        if is_warm_elsewhere:
            still_s += DEFER_PART * self._lease_s
        return self._stands_still(row.id, (row.epoch, row.lease), still_s)

    def _others(self, connection: Connection) -> dict[str, set[int]]:
        """The other nodes that take shards, with the shards of which they have standbys."""
        alive: dict[str, set[int]] = {}
        rows: Any = connection.execute("SELECT name, incarnation, beats, report FROM headwater.node").fetchall()
        self._reported_s = {str(incarnation): report.get("lease_s", 0.0) for _, incarnation, _, report in rows}
        for name, incarnation, beats, report in rows:
            lease_s = max(self._lease_s, self._reported_s[incarnation])
            stands_still = self._stands_still(name, (incarnation, beats), lease_s)
            if name != self._node and not report.get("leaves") and not stands_still:
                alive[name] = set(report.get("warm", ()))
        return alive

    def _standbys(self, rows: list[_Row], held: Mapping[int, int], others: set[str], warm: set[int]) -> tuple[int, ...]:
        """The shards of which this node should have a standby: those of each owner are dealt out to the next nodes."""
        ranked = []
        counts: Counter[str] = Counter()
        for row in rows:
            owner = row.owner.partition("#")[0] if row.owner is not None else ""
            number = counts[owner]
            counts[owner] += 1
            if row.id in held or row.format > self._format:
                continue
            nodes = sorted({self._node, owner, *others})
            distance = (nodes.index(self._node) - nodes.index(owner)) % len(nodes)
            is_needed = row.id in warm and owner not in others
            # 0 for one of the other nodes, 1 for the next one, and so on.
            ranked.append((not is_needed, (distance - 1 - number) % max(1, len(nodes) - 1), row.id))
        return tuple(sorted(shard for *_, shard in sorted(ranked)[: self._standbys_max]))

    def _stands_still(self, what: object, value: object, for_s: float) -> bool:
        """Whether this node has seen the same value for this long."""
        now_s = self._clock()
        seen = self._seen.get(what)
        if seen is None or seen[0] != value:
            seen = self._seen[what] = (value, now_s)
        return now_s - seen[1] >= for_s

    def _on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            self._is_warned = True
