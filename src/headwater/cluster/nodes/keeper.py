"""The keeper of a node: a process that manages ownership in Postgres, so that the supervisor never waits for Postgres.

It makes one turn (`ownership`) whenever the supervisor says so, and answers. A keeper that hangs, or a supervisor that
is paused, renews no lease: the processes of the shards end when theirs expires, and other nodes take them over. A turn
ends after a lease at the latest, because a server that hangs, and is replaced by another, would not end the connection.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, TypeAlias

import msgspec
import psycopg

from headwater.cluster.nodes.ownership import NameInUseError, Ownership, Standing, Turn
from headwater.cluster.nodes.schema import (
    Cluster,
    Connection,
    broken_promise,
    check_secret,
    claim_store,
    connect,
    create_tables,
    required_database,
    unusable_database,
)
from headwater.config import Settings
from headwater.operating_system import SYSTEM
from headwater.storage.interface import StorageError
from headwater.storage.tiering.objects import ObjectConflictError, ObjectStoreError, required_store
from headwater.storage.tiering.open import open_objects

log = logging.getLogger("headwater.cluster")

IDENTITY_KEY: Final = "CLUSTER"
"""The object with the id of the cluster, and a random part: no two prefixes have the same."""
COPYING_KEY: Final = "COPYING"
"""The object that exists while a data directory is copied into the cluster."""
_PACKET_MAX_BYTES: Final = 64 * 1024


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Postgres and the object store can be used, and belong together."""

    shards: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The node cannot start, or must end."""

    reason: str


Answer: TypeAlias = Standing | Opened | Refused

_decode_answer: Final = msgspec.json.Decoder(Answer).decode
_decode_turn: Final = msgspec.json.Decoder(Turn).decode
_encode: Final = msgspec.json.Encoder().encode


def send_turn(keeper: socket.socket, turn: Turn) -> None:
    with suppress(ConnectionError):  # The keeper is gone, as `receive_answer` will say.
        keeper.send(_encode(turn))


def receive_answer(keeper: socket.socket) -> Answer | None:
    """The next answer; None if the keeper has ended."""
    try:
        data = keeper.recv(_PACKET_MAX_BYTES)
    except ConnectionError:
        return None
    return _decode_answer(data) if data else None


def run_keeper(settings: Settings, node: str, owner: str, address: str, control: socket.socket) -> int:
    """Serve one supervisor; returns when the supervisor has ended."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        opened = open_cluster(settings)
    except (StorageError, ObjectStoreError, psycopg.Error) as error:
        control.send(_encode(Refused(str(error).strip())))
        return 1
    control.send(_encode(opened))
    cluster = settings.cluster
    ownership = Ownership(
        node,
        owner,
        address,
        cluster.lease_secs,
        require_standby=cluster.require_standby,
        standbys=cluster.standbys,
    )
    connection: Connection | None = None
    while data := control.recv(_PACKET_MAX_BYTES):
        turn = _decode_turn(data)
        try:
            with _deadline(cluster.lease_secs):
                if connection is None:
                    connection = connect(cluster.postgres_url, f"node {node}")
                    ownership.watch(connection)
                standing = ownership.turn(connection, turn)
        except NameInUseError as error:
            control.send(_encode(Refused(str(error))))
            return 1
        except psycopg.Error as error:
            standing = Standing({}, 0.0, {}, problem=str(error).strip())
            if connection is not None:
                connection.close()
            connection = None
        with suppress(OSError):
            control.send(_encode(standing))
    if connection is not None:
        with suppress(psycopg.Error):
            ownership.leave(connection)
    return 0


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `psycopg.OperationalError` in this block when the time is up. For the main thread of a process."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise psycopg.OperationalError(f"Postgres has not answered for {seconds:g} seconds")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def open_cluster(settings: Settings, *, is_copy: bool = False) -> Opened:
    """Check everything that a cluster relies on, and create what is missing: for a node, or for a copy into it."""
    cluster, cold = settings.cluster, settings.storage.cold
    if not cluster.postgres_url or not cluster.secret or cold is None:
        raise StorageError("The mode cluster needs cluster.postgres_url, cluster.secret and storage.cold.")
    with required_database():
        connection = connect(cluster.postgres_url, "start")
    with connection:
        problem = broken_promise(connection, require_standby=cluster.require_standby)
        if problem is not None:
            raise unusable_database(problem)
        found = create_tables(connection, cluster.name, cluster.shards)
        check_secret(connection, found, cluster.secret)
        with required_store():
            _check_objects(connection, cold, found, is_copy=is_copy)
    return Opened(found.shards)


def _check_objects(connection: Connection, cold: str, cluster: Cluster, *, is_copy: bool) -> None:
    objects = open_objects(cold)
    objects.check_conditions()
    with suppress(ObjectConflictError):
        objects.create(IDENTITY_KEY, f"{cluster.id} {secrets.token_hex(16)}".encode())
    stored = objects.get(IDENTITY_KEY)
    identity = "" if stored is None else stored.data.decode("utf-8", "replace")
    if identity.partition(" ")[0] != cluster.id:
        raise StorageError(f"{cold} belongs to another cluster than the database. Give each cluster its own prefix.")
    if not claim_store(connection, identity):
        raise StorageError(
            f"{cold} is not the object store of the cluster in the database. Set storage.cold, and the address in"
            " AWS_ENDPOINT_URL, to those of the other nodes; a second cluster needs its own database."
        )
    if not is_copy and objects.get(COPYING_KEY) is not None:
        raise StorageError(
            "A data directory is being copied into the cluster, or such a copy was interrupted. Wait for it, or repeat"
            " `headwater store copy --to-mode cluster`."
        )


def start_keeper(settings: Settings, node: str, owner: str, address: str) -> tuple[socket.socket, int, Opened]:
    """Fork the keeper; returns its socket, its process and what it found. Raises `StorageError` if it cannot start."""
    ours, theirs = SYSTEM.packet_pair()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ours.close()
            code = run_keeper(settings, node, owner, address, theirs)
        except BaseException:
            log.exception("the keeper failed unexpectedly")
        finally:
            logging.shutdown()
            os._exit(code)
    theirs.close()
    answer = receive_answer(ours)
    if not isinstance(answer, Opened):
        ours.close()
        os.waitpid(pid, 0)
        raise StorageError(answer.reason if isinstance(answer, Refused) else "The keeper of the node ended.")
    ours.setblocking(False)
    return ours, pid, answer
