"""The tables of a cluster in Postgres, and the requirements on the server.

`shard` says who owns a shard and up to which record its journal goes; `journal` has the batches that the object store
does not have yet; `node` has the nodes, alive or not. There are no times of day in them: a lease is a counter that its
owner raises, and a node takes a shard over only if it saw the counter unchanged for the length of the lease, by its own
clock. So clocks may differ.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headwater.storage.interface import StorageError

log = logging.getLogger("headwater.cluster")

FORMAT: Final = 1
"""The version of batches and packs. A node does not take over a shard that was written by a later version."""

Connection: TypeAlias = psycopg.Connection[tuple[object, ...]]

_CONNECT_TIMEOUT_S: Final = 3
_LOCK: Final = 0x68656164
"""The lock of the transaction that creates the tables: nodes may start at the same time."""
_LOCK_TIMEOUT_S: Final = 1
"""How long a change of the tables may wait for their readers: everything else waits behind it, also commits."""
_CHANGE_ATTEMPTS: Final = 10
_CHANGE_RETRY_S: Final = 2.0

SYNCHRONOUS: Final = (
    " AND current_setting('synchronous_commit') IN ('on', 'remote_apply')"
    " AND current_setting('synchronous_standby_names') <> ''"
)
"""Part of every condition for a change of a shard, so that a reconfigured server cannot change anything."""
SETTINGS_READ: Final = "SELECT pg_conf_load_time()::text"
"""When this session has read the settings of the server for the last time. If that changes while a commit waits for a
standby, the wait may have ended because `synchronous_standby_names` was emptied: Postgres does not warn about that."""

_TABLES: Final = """
CREATE SCHEMA IF NOT EXISTS headwater;
CREATE TABLE IF NOT EXISTS headwater.cluster (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    id text NOT NULL, name text NOT NULL, shards integer NOT NULL
);
ALTER TABLE headwater.cluster ADD COLUMN IF NOT EXISTS proof text, ADD COLUMN IF NOT EXISTS store text;
CREATE TABLE IF NOT EXISTS headwater.node (
    name text PRIMARY KEY, incarnation text NOT NULL, beats bigint NOT NULL DEFAULT 0, address text NOT NULL,
    report jsonb NOT NULL DEFAULT '{}'
) WITH (fillfactor = 25);
-- Updated at every commit. No index has a column that changes, and a page has room for new versions of its rows: then
-- Postgres puts them into the same page and removes the old ones itself. If a long transaction prevents that, a row
-- moves to a new page. Only a vacuum notes that the former page has room again, so it runs whenever there is a dead
-- row: the table is small. It does not cut the table, which would lock it.
CREATE TABLE IF NOT EXISTS headwater.shard (
    id integer PRIMARY KEY, epoch bigint NOT NULL DEFAULT 0, seq bigint NOT NULL DEFAULT 0,
    confirmed bigint NOT NULL DEFAULT 0, owner text, lease bigint NOT NULL DEFAULT 0, address text,
    format integer NOT NULL DEFAULT 1
) WITH (fillfactor = 10);
ALTER TABLE headwater.shard ADD COLUMN IF NOT EXISTS lease_s double precision NOT NULL DEFAULT 0;
ALTER TABLE headwater.shard
    SET (autovacuum_vacuum_threshold = 0, autovacuum_vacuum_scale_factor = 0, vacuum_truncate = off);
CREATE TABLE IF NOT EXISTS headwater.journal (
    shard integer NOT NULL, seq bigint NOT NULL, batch bytea NOT NULL, PRIMARY KEY (shard, seq)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE headwater.journal ALTER COLUMN batch SET STORAGE EXTERNAL;
"""
_HAS_TABLES: Final = """
SELECT to_regclass('headwater.node') IS NOT NULL
    AND (SELECT count(*) FROM pg_attribute WHERE attrelid = to_regclass('headwater.cluster')
        AND attname IN ('proof', 'store') AND NOT attisdropped) = 2
    AND EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass('headwater.shard')
        AND attname = 'lease_s' AND NOT attisdropped)
    AND EXISTS (SELECT 1 FROM pg_class WHERE oid = to_regclass('headwater.shard') AND reloptions @> ARRAY[
        'autovacuum_vacuum_threshold=0', 'autovacuum_vacuum_scale_factor=0', 'vacuum_truncate=off'])
    AND EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass('headwater.journal')
        AND attname = 'batch' AND attstorage = 'e')
"""
"""Whether `_TABLES` has nothing to do. It must not run then: a statement that changes a table waits for everybody who
reads it, such as a backup, even if nothing changes, and everybody else then waits for that statement."""


class Cluster(NamedTuple):
    """The identity of a cluster: the same in the database and in the object store."""

    id: str
    name: str
    shards: int


@contextmanager
def required_database() -> Iterator[None]:
    """Translate the errors of Postgres to `StorageError`, where the work cannot continue without the database."""
    try:
        yield
    except psycopg.Error as error:
        raise unusable_database(error) from error


def unusable_database(problem: object) -> StorageError:
    return StorageError(f"The database of cluster.postgres_url cannot be used: {problem}")


def connect(url: str, application: str) -> Connection:
    """Connect to the primary: of several hosts, the one that accepts writes.

    A former primary that is running again is passed over: its timeline is older than one that was seen before.
    """
    given = conninfo_to_dict(url)
    defaults: dict[str, str | int] = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "application_name": f"headwater {application}",
        "keepalives_idle": 2,
        "keepalives_interval": 1,
        "keepalives_count": 2,
        "tcp_user_timeout": 4000,
    }
    parameters = {name: value for name, value in defaults.items() if name not in given}
    hosts, ports = str(given.get("host") or "").split(","), str(given.get("port") or "").split(",")
    problem = psycopg.OperationalError(
        "No server in cluster.postgres_url accepts writes. Name the primary, or all servers"
    )
    for number, host in enumerate(hosts):
        address = {"host": host, "port": ports[min(number, len(ports) - 1)]}
        try:
            connection = psycopg.connect(make_conninfo(url, **parameters, **address), autocommit=True)
        except psycopg.OperationalError as error:
            problem = error
            continue
        timeline = _timeline(connection)
        if timeline is not None and timeline >= _newest.timeline:
            _newest.timeline = timeline
            # A statement that is not prepared yet takes another round trip.
            connection.prepare_threshold = 1
            return connection
        connection.close()
        if timeline is not None:
            problem = psycopg.OperationalError(
                f"{host}:{address['port']} is on timeline {timeline}, and {_newest.timeline} was seen: it is a former"
                " primary. Rebuild it as a standby"
            )
    raise problem


class _NewestTimeline:
    """The newest timeline that this process has seen: no server with an older one has everything."""

    timeline = 0


_newest: Final = _NewestTimeline()


def newest_timeline() -> int:
    """The newest timeline that this process has seen: that of its last connection."""
    return _newest.timeline


def _timeline(connection: Connection) -> int | None:
    """The timeline of a primary; None for a standby."""
    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    if row is None or row[0]:
        return None
    row = connection.execute("SELECT pg_walfile_name(pg_current_wal_lsn())").fetchone()
    assert row is not None
    return int(str(row[0])[:8], 16)


def broken_promise(connection: Connection, *, require_standby: bool) -> str | None:
    """Why commits could be lost with this server, or None."""
    row = connection.execute(
        "SELECT current_setting('synchronous_commit'), current_setting('synchronous_standby_names'),"
        " current_setting('fsync'), pg_is_in_recovery(), current_setting('transaction_read_only')"
    ).fetchone()
    assert row is not None
    level, names, fsync, is_standby, is_read_only = row
    if is_standby or is_read_only == "on":
        return "it does not take writes. Give the primary, or all servers with target_session_attrs=read-write."
    if not require_standby:
        return None
    if level not in ("on", "remote_apply"):
        return f"synchronous_commit is {level}: a commit could be lost with this server. Set it to on."
    if fsync != "on":
        return "fsync is off: a commit could be lost with the power. Set it to on."
    if not names:
        return "synchronous_standby_names is empty: a commit does not wait for a standby. Set it to 'ANY 1 (*)'."
    states = [state for (state,) in connection.execute("SELECT sync_state FROM pg_stat_replication").fetchall()]
    if states and all(state is None for state in states):
        return "the user may not see the standbys. GRANT pg_monitor to it."
    if not {"sync", "quorum"} & set(states):
        return "no synchronous standby is connected."
    return None


def create_tables(connection: Connection, name: str, shards: int) -> Cluster:
    """Create what is missing. Raises `StorageError` if the database is another cluster's."""
    for attempts_left in reversed(range(_CHANGE_ATTEMPTS)):
        try:
            return _create_tables(connection, name, shards)
        except psycopg.errors.LockNotAvailable:
            if not attempts_left:
                raise StorageError(
                    "The tables of the cluster must be changed for this version, and are in use for longer than commits"
                    " may wait. Start the node again when no backup or other long transaction reads them."
                ) from None
            log.warning("the tables of the cluster are in use; they will be changed later")
            time.sleep(_CHANGE_RETRY_S)
    raise AssertionError


def _create_tables(connection: Connection, name: str, shards: int) -> Cluster:
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        if connection.execute(_HAS_TABLES).fetchone() != (True,):
            connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_S}s'")
            connection.execute(_TABLES)
            connection.execute("SET LOCAL lock_timeout TO DEFAULT")
        connection.execute(
            "INSERT INTO headwater.cluster (id, name, shards) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
            [secrets.token_hex(16), name, shards],
        )
        row = connection.execute("SELECT id, name, shards FROM headwater.cluster").fetchone()
        assert row is not None
        cluster = Cluster(str(row[0]), str(row[1]), int(str(row[2])))
        if cluster.name != name:
            raise StorageError(
                f"The database of cluster.postgres_url belongs to the cluster {cluster.name!r}, and cluster.name is"
                f" {name!r}. Give each cluster its own database."
            )
        connection.execute(
            "INSERT INTO headwater.shard (id) SELECT generate_series(0, %s - 1) ON CONFLICT DO NOTHING",
            [cluster.shards],
        )
    return cluster


def check_secret(connection: Connection, cluster: Cluster, secret: str) -> None:
    """Raise `StorageError` if the nodes of the cluster have another secret: this one would take shards that no other
    node can reach."""
    proof = hmac.new(secret.encode(), cluster.id.encode(), "sha256").hexdigest()
    connection.execute("UPDATE headwater.cluster SET proof = %s WHERE proof IS NULL", [proof])
    row = connection.execute("SELECT proof FROM headwater.cluster").fetchone()
    assert row is not None
    if not hmac.compare_digest(str(row[0]), proof):
        raise StorageError(
            "cluster.secret is not that of the other nodes of the cluster. To change it, stop all nodes and run"
            " UPDATE headwater.cluster SET proof = NULL."
        )


def claim_store(connection: Connection, identity: str) -> bool:
    """Whether the cluster uses the object store with this identity. The first node decides which one it uses."""
    connection.execute("UPDATE headwater.cluster SET store = %s WHERE store IS NULL", [identity])
    return connection.execute("SELECT store FROM headwater.cluster").fetchone() == (identity,)
