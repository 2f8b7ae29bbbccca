"""The keeper of a node: what it refuses to start with, and that a database that hangs does not hang it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from obstore.store import MemoryStore
from psycopg.conninfo import make_conninfo

from headwater.cluster.nodes.keeper import Refused, open_cluster, receive_answer, send_turn, start_keeper
from headwater.cluster.nodes.ownership import Standing, Turn
from headwater.config import ClusterSettings, Settings, StorageSettings
from headwater.stack.database import LocalPostgres
from headwater.storage.interface import StorageError
from headwater.storage.tiering.object_store import ObjectStoreObjects
from tests.cluster.nodes.clusters import SECRET
from tests.storage.tiering.objects import SwitchedObjects, memory_objects
from tests.waiting import wait_until

LEASE_S = 3.0


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> ObjectStoreObjects:
    found = memory_objects()
    monkeypatch.setattr("headwater.cluster.nodes.keeper.open_objects", lambda _: found)
    return found


@pytest.fixture
def database(single: LocalPostgres) -> Iterator[str]:
    """A new database."""
    with psycopg.connect(single.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE kept")
        try:
            yield make_conninfo(single.url, dbname="kept")
        finally:
            connection.execute("DROP DATABASE kept WITH (FORCE)")


def settings_of(url: str, **cluster: object) -> Settings:
    given = {"postgres_url": url, "secret": SECRET, "shards": 2, "lease_secs": LEASE_S, "require_standby": False}
    return Settings(
        storage=StorageSettings(mode="cluster", cold="s3://nowhere/prefix"),
        cluster=ClusterSettings.model_validate({**given, **cluster}),
    )


@contextmanager
def paused_backend(url: str) -> Iterator[None]:
    """The process of the keeper's connection does not answer within the block."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'headwater node n' AND datname = 'kept'"
        ).fetchone()
    assert row is not None
    os.kill(int(row[0]), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(int(row[0]), signal.SIGCONT)


def test_turn_at_a_database_that_hangs_ends_and_the_next_one_connects_again(
    database: str, objects: ObjectStoreObjects
) -> None:
    keeper, pid, opened = start_keeper(settings_of(database), "n", "n#1", "127.0.0.1:1")
    keeper.settimeout(60)

    def turn() -> Standing:
        send_turn(keeper, Turn({}))
        answer = receive_answer(keeper)
        assert isinstance(answer, Standing)
        return answer

    try:
        assert opened.shards == 2
        assert not turn().problem
        with paused_backend(database):
            started_s = time.monotonic()
            assert f"has not answered for {LEASE_S:g} seconds" in turn().problem
            assert time.monotonic() - started_s >= LEASE_S
            assert not turn().problem, "on another connection"
    finally:
        keeper.close()
        os.waitpid(pid, 0)


def test_keeper_of_a_second_node_of_the_same_name_reports_it_and_ends(
    database: str, objects: ObjectStoreObjects
) -> None:
    open_cluster(settings_of(database))  # A keeper has a copy of the objects.
    keepers = [start_keeper(settings_of(database), "n", f"n#{number}", "127.0.0.1:1") for number in range(2)]
    answers: list[object] = []
    while len(answers) < 20 and not any(isinstance(answer, Refused) for answer in answers):
        for keeper, _, _ in keepers:
            keeper.settimeout(60)
            send_turn(keeper, Turn({}))
            answers.append(receive_answer(keeper))
    assert isinstance(answers[-1], Refused)
    assert answers[-1].reason.startswith("Another node of the cluster has the name 'n'.")
    codes = []
    for keeper, pid, _ in reversed(keepers):
        keeper.close()
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert codes == [1, 0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"options": "-c default_transaction_read_only=on"}, "it does not take writes"),
        ({"options": "-c synchronous_commit=local"}, "synchronous_commit is local"),
        ({"options": "-c synchronous_commit=remote_write"}, "synchronous_commit is remote_write"),
        ({}, "synchronous_standby_names is empty"),
        ({"dbname": "missing"}, 'database "missing" does not exist'),
    ],
)
def test_database_that_could_lose_commits_is_refused(
    database: str, objects: ObjectStoreObjects, change: dict[str, str], reason: str
) -> None:
    with pytest.raises(StorageError, match=reason) as refused:
        open_cluster(settings_of(make_conninfo(database, **change), require_standby=True))
    assert "cluster.postgres_url cannot be used" in str(refused.value)


def test_standby_that_is_named_and_not_connected_is_refused(
    database: str, single: LocalPostgres, objects: ObjectStoreObjects
) -> None:
    # The setting applies to the whole server: until it is reset, the commits of all sessions wait.
    with psycopg.connect(single.url, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (gone)'")
        connection.execute("SELECT pg_reload_conf()")
        try:
            wait_until(
                lambda: connection.execute("SHOW synchronous_standby_names").fetchone() == ("ANY 1 (gone)",),
                what="the setting",
            )
            with pytest.raises(StorageError, match="no synchronous standby is connected"):
                open_cluster(settings_of(database, require_standby=True))
        finally:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")
            wait_until(
                lambda: connection.execute("SHOW synchronous_standby_names").fetchone() == ("",), what="the setting"
            )


def test_store_without_conditional_writes_is_refused(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unconditional(ObjectStoreObjects):
        def create(self, key: str, data: bytes) -> str:
            self.put(key, data)
            return "the tag of everything"

    found = Unconditional(MemoryStore(), "s3://nowhere/prefix")
    monkeypatch.setattr("headwater.cluster.nodes.keeper.open_objects", lambda _: found)
    with pytest.raises(StorageError, match="no conditional writes"):
        open_cluster(settings_of(database))


def test_second_cluster_in_one_database_or_one_prefix_is_refused(database: str, objects: ObjectStoreObjects) -> None:
    open_cluster(settings_of(database))
    with pytest.raises(StorageError, match=r"the cluster 'headwater', and cluster\.name is 'second'"):
        open_cluster(settings_of(database, name="second"))
    with psycopg.connect(database) as connection:
        connection.execute("UPDATE headwater.cluster SET id = 'that of another database', proof = NULL")
    with pytest.raises(StorageError, match="belongs to another cluster than the database"):
        open_cluster(settings_of(database))


def test_node_with_another_object_store_is_refused(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second cluster with the same name and secret, or a node with a wrong prefix or address of the store."""
    stores = [memory_objects(), memory_objects()]
    opened = [stores[0], stores[1], stores[0], stores[1]]
    monkeypatch.setattr("headwater.cluster.nodes.keeper.open_objects", lambda _: opened.pop(0))
    open_cluster(settings_of(database))
    with pytest.raises(StorageError, match="is not the object store of the cluster in the database"):
        open_cluster(settings_of(database))
    open_cluster(settings_of(database))
    with pytest.raises(StorageError, match="is not the object store of the cluster in the database"):
        open_cluster(settings_of(database))


def test_node_with_another_secret_is_refused(database: str, objects: ObjectStoreObjects) -> None:
    open_cluster(settings_of(database))
    other = settings_of(database, secret="the secret of somebody else")
    with pytest.raises(StorageError, match=r"cluster\.secret is not that of the other nodes"):
        open_cluster(other)
    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT proof FROM headwater.cluster").fetchone()
        assert row is not None
        assert SECRET not in row[0]
        connection.execute("UPDATE headwater.cluster SET proof = NULL")
    open_cluster(other)


def test_store_that_cannot_be_reached_is_refused(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = SwitchedObjects(memory_objects())
    objects.is_down = True
    monkeypatch.setattr("headwater.cluster.nodes.keeper.open_objects", lambda _: objects)
    with pytest.raises(StorageError, match=r"storage\.cold cannot be used: the store is switched off"):
        open_cluster(settings_of(database))
