"""The journal in Postgres against real servers: order, fencing, commits of unknown outcome, and refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import psycopg
import pytest

from headwater.cluster.nodes.ownership import Ownership, Standing, Turn
from headwater.cluster.nodes.postgres_journal import NOT_SYNCHRONOUS, PostgresJournal
from headwater.cluster.nodes.schema import SETTINGS_READ, Connection, broken_promise, connect, create_tables
from headwater.stack.database import LocalPostgres
from headwater.stack.replicated_postgres import ReplicatedPostgres
from headwater.storage.interface import StorageError, WriteFailedError
from tests.cluster.nodes.conftest import SHARDS
from tests.cluster.nodes.servers import replicated_postgres
from tests.waiting import wait_until

_opened: list[PostgresJournal] = []


@pytest.fixture(autouse=True)
def _each_test_ends_without_connections() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def opened(journal: PostgresJournal) -> PostgresJournal:
    """A journal that is closed at the end of the test."""
    _opened.append(journal)
    return journal


def journal_of(running: LocalPostgres, shard: int, epoch: int = 0) -> PostgresJournal:
    return opened(PostgresJournal(running.url, shard, epoch, require_standby=False, is_ours=lambda: False))


def content(journal: PostgresJournal, after: int = 0) -> list[bytes]:
    return [bytes(batch) for batch in journal.batches(after)]


def test_batches_are_replayed_in_order_from_any_record(single: LocalPostgres, shard: int) -> None:
    journal = journal_of(single, shard)
    for number in range(40):
        journal.append(number * 3, number * 3 + 3, (b"batch", str(number).encode()))
    again = journal_of(single, shard)
    assert again.last_lsn == 120
    assert content(again) == [b"batch%d" % number for number in range(40)]
    assert content(again, 117) == [b"batch39"]
    # A batch of which only the end is needed is needed.
    assert content(again, 116) == [b"batch38", b"batch39"][-2:]


def test_trimmed_batches_are_gone(single: LocalPostgres, shard: int) -> None:
    journal = journal_of(single, shard)
    for number in range(4):
        journal.append(number, number + 1, (b"%d" % number,))
    journal.trim(2)
    assert content(journal) == [b"2", b"3"]


def test_former_owner_can_neither_commit_nor_trim(single: LocalPostgres, shard: int) -> None:
    former = journal_of(single, shard)
    former.append(0, 1, (b"of the former owner",))
    take_over(single, shard)
    with pytest.raises(WriteFailedError, match="taken over"):
        former.append(1, 2, (b"late",))
    former.trim(1)
    assert content(journal_of(single, shard, 1)) == [b"of the former owner"]


def test_without_the_epoch_two_owners_overwrite_each_other(single: LocalPostgres, shard: int) -> None:
    """The broken variant: what the test above would not notice if the epoch were not compared."""
    former = journal_of(single, shard)
    former._commit_statement = former._commit_statement.replace("AND epoch = %(epoch)s", "")
    take_over(single, shard)
    former.append(0, 1, (b"of the former owner",))
    assert content(journal_of(single, shard, 1)) == [b"of the former owner"]


def test_batch_that_does_not_follow_is_refused(single: LocalPostgres, shard: int) -> None:
    journal = journal_of(single, shard)
    journal.append(0, 5, (b"first",))
    with pytest.raises(WriteFailedError, match="at record 5"):
        journal.append(3, 9, (b"second",))


@pytest.mark.parametrize("when", ["before", "after"])
def test_batch_whose_connection_broke_is_committed_once(
    single: LocalPostgres, shard: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(PostgresJournal(single.url, shard, 0, require_standby=False, retry_s=0))
    write = journal._write
    breaks = iter([True])

    def breaking(statement: str, **values: object) -> bool:
        is_broken = next(breaks, False)
        done = write(statement, **values) if when == "after" or not is_broken else False
        if is_broken:
            raise psycopg.OperationalError("cut")
        return done

    monkeypatch.setattr(journal, "_write", breaking)
    journal.append(0, 1, (b"once",))
    journal.append(1, 2, (b"next",))
    assert content(journal) == [b"once", b"next"]


def test_table_that_changes_at_every_commit_does_not_grow(single: LocalPostgres, shard: int) -> None:
    journal = journal_of(single, shard)
    sizes = []
    with connect(single.url, "test") as connection:
        for number in range(1500):
            journal.append(number, number + 1, (b"x",))
            if number in (500, 1499):
                row = connection.execute(
                    "SELECT pg_relation_size('headwater.shard'), pg_relation_size('headwater.shard_pkey')"
                ).fetchone()
                sizes.append(row)
    assert sizes[0] == sizes[1]


def test_database_of_another_cluster_is_refused(single: LocalPostgres) -> None:
    with connect(single.url, "test") as connection:
        with pytest.raises(StorageError, match="belongs to the cluster 'test'"):
            create_tables(connection, "other", SHARDS)
        assert create_tables(connection, "test", 8).shards == SHARDS


def test_server_that_could_lose_commits_is_refused(single: LocalPostgres) -> None:
    with connect(single.url, "test") as connection:
        assert "synchronous_standby_names is empty" in str(broken_promise(connection, require_standby=True))
        assert broken_promise(connection, require_standby=False) is None
        connection.execute("SET synchronous_commit = local")
        assert "synchronous_commit is local" in str(broken_promise(connection, require_standby=True))


def take_over(running: LocalPostgres, shard: int) -> None:
    with connect(running.url, "test") as connection:
        connection.execute("UPDATE headwater.shard SET epoch = epoch + 1 WHERE id = %s", [shard])


# -- with standbys -----------------------------------------------------------------------------------------------------


@contextmanager
def stopped_replication(servers: ReplicatedPostgres) -> Iterator[None]:
    """Suspend the processes that send the log of the primary to the standbys, and kill them at the end of the block."""
    primary = servers.servers[servers.primary].process
    assert primary is not None
    senders = [
        process for process in psutil.Process(primary.pid).children() if "walsender" in " ".join(process.cmdline())
    ]
    assert len(senders) == 2
    for process in senders:
        process.suspend()
    try:
        yield
    finally:
        for process in senders:
            process.kill()


class ReadsBackOnly(PostgresJournal):
    """The broken variant: it takes a row that it can read for one that survives."""

    def _confirm(self, new: int) -> bool:
        return self._epoch_and_seq()[1] == new


@pytest.mark.parametrize("kind", [PostgresJournal, ReadsBackOnly])
def test_commit_without_a_standby_is_not_acknowledged_until_a_standby_has_it(
    kind: type[PostgresJournal], caplog: pytest.LogCaptureFixture
) -> None:
    with replicated_postgres(wal_receiver_timeout="120s") as servers:
        with connect(servers.url, "test") as connection:
            wait_until(
                lambda: broken_promise(connection, require_standby=True) is None, what="standbys that are in step"
            )
            create_tables(connection, "test", 1)
        journal = opened(kind(servers.url, 0, 0, retry_s=0.01))
        journal.append(0, 1, (b"replicated",))
        acknowledged = threading.Event()

        def append() -> None:
            journal.append(1, 2, (b"in doubt",))
            acknowledged.set()

        writer = threading.Thread(target=append)
        with stopped_replication(servers):
            writer.start()
            # Cancel the wait of the commit for a standby, and that of the write that confirms it.
            warnings = 2 if kind is PostgresJournal else 1
            with psycopg.connect(servers.servers[servers.primary].url, autocommit=True) as admin:

                def is_warned() -> bool:
                    admin.execute("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
                    return caplog.text.count("Postgres warns") >= warnings

                wait_until(is_warned, what="a commit that does not wait for a standby any more")
            if kind is ReadsBackOnly:
                assert acknowledged.wait(60)
            assert acknowledged.is_set() == (kind is ReadsBackOnly)
            servers.servers[servers.primary].kill()
        servers.watch()
        writer.join(60)
        assert not writer.is_alive()
        found = content(opened(PostgresJournal(servers.url, 0, 0)))
        # The broken variant acknowledged a batch and lost it.
        assert found == ([b"replicated"] if kind is ReadsBackOnly else [b"replicated", b"in doubt"])
        former = next(server for number, server in enumerate(servers.servers) if number != servers.primary)
        with psycopg.connect(former.url) as standby:
            assert "does not take writes" in str(broken_promise(standby, require_standby=True))
        if kind is PostgresJournal:
            check_stale_standby(servers, former)


def empty_standby_names(servers: ReplicatedPostgres) -> None:
    """As a tool does that would rather take writes without a standby than none. Waiting commits return at once."""
    with psycopg.connect(servers.servers[servers.primary].url, autocommit=True) as admin:
        admin.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
        admin.execute("SELECT pg_reload_conf()")


def wait_for_waiting_commit(servers: ReplicatedPostgres) -> None:
    with psycopg.connect(servers.servers[servers.primary].url, autocommit=True) as admin:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: admin.execute(waiting).fetchone() == (1,), what="a commit that waits for a standby")


@pytest.mark.parametrize("is_checked", [True, False])
def test_commit_that_returns_because_the_standby_names_were_emptied_is_not_acknowledged(is_checked: bool) -> None:
    """Without the check of when the settings were read, which is the broken variant, it is acknowledged and lost."""
    with replicated_postgres(wal_receiver_timeout="120s") as servers:
        with connect(servers.url, "test") as connection:
            wait_until(
                lambda: broken_promise(connection, require_standby=True) is None, what="standbys that are in step"
            )
            create_tables(connection, "test", 1)
        journal = opened(PostgresJournal(servers.url, 0, 0))
        journal.append(0, 1, (b"replicated",))
        journal._require_standby = is_checked  # The conditions of the statements stay.
        refusals: list[str] = []

        def append() -> None:
            try:
                journal.append(1, 2, (b"in doubt",))
                refusals.append("")
            except WriteFailedError as error:
                refusals.append(str(error))

        writer = threading.Thread(target=append)
        with stopped_replication(servers):
            writer.start()
            wait_for_waiting_commit(servers)
            empty_standby_names(servers)
            writer.join(60)
            assert refusals == [NOT_SYNCHRONOUS if is_checked else ""]
            servers.servers[servers.primary].kill()
        servers.watch()
        assert content(opened(PostgresJournal(servers.url, 0, 0))) == [b"replicated"]


class SuspendsReplication(Ownership):
    """A node whose turn finds that nothing leaves the primary any more when it takes shards."""

    def __init__(self, servers: ReplicatedPostgres, stack: ExitStack) -> None:
        super().__init__("n", "n#1", "127.0.0.1:1", 1.0, clock=lambda: self.now_s)
        self.now_s += 1.0
        self._servers = servers
        self._stack = stack

    now_s = 100.0

    def _others(self, connection: Connection) -> dict[str, set[int]]:
        self._stack.enter_context(stopped_replication(self._servers))
        return super()._others(connection)


@pytest.mark.parametrize("is_checked", [True, False])
def test_epoch_whose_commit_returns_because_the_standby_names_were_emptied_is_not_taken(
    is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check at the end of the turn, which is the broken variant, the same epoch can be given out again."""
    with replicated_postgres(wal_receiver_timeout="120s") as servers, connect(servers.url, "test") as connection:
        wait_until(lambda: broken_promise(connection, require_standby=True) is None, what="standbys that are in step")
        create_tables(connection, "test", 1)
        with ExitStack() as stack:
            ownership = SuspendsReplication(servers, stack)
            ownership.watch(connection)
            if not is_checked:
                monkeypatch.setattr(ownership, "_problem_since", lambda *_: None)
            standings: list[Standing] = []
            node = threading.Thread(target=lambda: standings.append(ownership.turn(connection, Turn({}))))
            node.start()
            wait_for_waiting_commit(servers)
            empty_standby_names(servers)
            node.join(60)
            (standing,) = standings
            assert standing.held == ({} if is_checked else {0: 1})
            assert ("synchronous_standby_names is empty" in standing.problem) == is_checked
            servers.servers[servers.primary].kill()
        servers.watch()
        with connect(servers.url, "test") as promoted:
            assert promoted.execute("SELECT epoch FROM headwater.shard").fetchone() == (0,)


def test_turn_and_commit_during_which_settings_are_read_again_prove_that_they_are_replicated() -> None:
    """Also if the list of standbys was only empty for a moment: a commit is confirmed, a turn gives nothing."""
    with replicated_postgres() as servers, connect(servers.url, "test") as connection:
        wait_until(lambda: broken_promise(connection, require_standby=True) is None, what="standbys that are in step")
        create_tables(connection, "test", 1)
        journal = opened(PostgresJournal(servers.url, 0, 0))
        journal.append(0, 1, (b"before",))
        commits_confirmed = "SELECT confirmed FROM headwater.shard"
        assert connection.execute(commits_confirmed).fetchone() == (0,)
        with psycopg.connect(servers.servers[servers.primary].url) as locking:
            locking.execute("SELECT 1 FROM headwater.shard FOR UPDATE")
            writer = threading.Thread(target=journal.append, args=(1, 2, (b"during",)))
            writer.start()
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            wait_until(lambda: connection.execute(waiting).fetchone() == (1,), what="a commit that waits for a lock")
            read = connection.execute(SETTINGS_READ).fetchone()
            connection.execute("SELECT pg_reload_conf()")
            wait_until(lambda: connection.execute(SETTINGS_READ).fetchone() != read, what="the settings")
        writer.join(60)
        assert connection.execute(commits_confirmed).fetchone() == (1,)
        ownership = Ownership("n", "n#1", "127.0.0.1:1", 1.0)
        assert ownership._problem_since(connection, read) == "Postgres has read its settings again meanwhile"
        assert not ownership.turn(connection, Turn({})).problem


class ReadsAnyServer(PostgresJournal):
    """The broken variant: it reads from a server that does not take writes."""

    def _connected(self) -> psycopg.Connection[tuple[object, ...]]:
        if self._connection is None:
            self._connection = psycopg.connect(self._url, autocommit=True)
        return self._connection


def check_stale_standby(servers: ReplicatedPostgres, behind: LocalPostgres) -> None:
    """A shard that is opened from a standby that is behind does not have what was acknowledged."""
    with psycopg.connect(behind.url, autocommit=True) as standby:
        standby.execute("SELECT pg_wal_replay_pause()")
        wait_until(
            lambda: standby.execute("SELECT pg_get_wal_replay_pause_state()").fetchone() == ("paused",),
            what="a standby that stays behind",
        )
        opened(PostgresJournal(servers.url, 0, 0)).append(2, 3, (b"acknowledged",))
        stale = opened(ReadsAnyServer(behind.url, 0, 0))
        assert (stale.last_lsn, content(stale)) == (2, [b"replicated", b"in doubt"]), "it looks whole, and is not"
        with pytest.raises(psycopg.OperationalError, match="accepts writes"):
            PostgresJournal(behind.url, 0, 0)
        assert content(opened(PostgresJournal(servers.url, 0, 0)))[-1] == b"acknowledged"
        standby.execute("SELECT pg_wal_replay_resume()")
