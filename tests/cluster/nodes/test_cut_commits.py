"""Commits whose answer is cut at any byte, or that are carried out late: each batch is there exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import psycopg
import pytest

from headwater.cluster.nodes.ownership import Ownership, Turn
from headwater.cluster.nodes.postgres_journal import PostgresJournal
from headwater.cluster.nodes.schema import connect
from headwater.stack.database import LocalPostgres
from headwater.storage.interface import WriteFailedError
from tests.client.proxies import CutAnswers


@contextmanager
def cut_answers(running: LocalPostgres) -> Iterator[tuple[CutAnswers, str]]:
    """The proxy, and the address of the database through it."""
    with closing(CutAnswers(running.url)) as proxy:
        parts, port = urlsplit(running.url), urlsplit(proxy.url).port
        yield proxy, parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{port}")).geturl()


def journal_of(url: str, shard: int, *, epoch: int = 0) -> PostgresJournal:
    return PostgresJournal(url, shard, epoch, require_standby=False, retry_s=0)


def test_commit_whose_answer_is_cut_at_any_byte_is_made_once(single: LocalPostgres, shard: int) -> None:
    with cut_answers(single) as (proxy, url), closing(journal_of(url, shard)) as journal:
        # The statements are prepared by now, as they are in a process that has written.
        for number in range(3):
            journal.append(number, number + 1, (b"%d" % number,))
        cuts, size, number = 0, 0, 3
        while True:
            proxy.left = size
            journal.append(number, number + 1, (b"%d" % number,))
            number += 1
            was_cut, proxy.left = proxy.left is None, None
            if not was_cut:
                break
            cuts += 1
            # A connection that was cut is made again, and its statements are prepared again.
            for _ in range(2):
                journal.append(number, number + 1, (b"%d" % number,))
                number += 1
            size += 1 if size < 8 else 4
        assert cuts > 10, "an answer has more bytes than that"
        assert [bytes(batch) for batch in journal.batches(0)] == [b"%d" % each for each in range(number)]


def test_commit_that_is_carried_out_after_its_repeat_changes_nothing(single: LocalPostgres, shard: int) -> None:
    with closing(journal_of(single.url, shard)) as late, closing(journal_of(single.url, shard)) as journal:
        journal.append(0, 2, (b"once",))
        assert not late._write(late._commit_statement, old=0, new=2, batch=b"once")
        journal.append(2, 3, (b"next",))
        assert not late._write(late._commit_statement, old=0, new=2, batch=b"once")
        assert [bytes(batch) for batch in journal.batches(0)] == [b"once", b"next"]


def test_commit_with_a_warning_is_not_acknowledged_until_a_write_returns_without_one(
    single: LocalPostgres, shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(journal_of(single.url, shard)) as journal:
        warnings = iter([True, True, False])
        statements: list[str] = []
        write = journal._write

        def warned(statement: str, **values: object) -> bool:
            done = write(statement, **values)
            statements.append("commit" if "INSERT" in statement else "confirm")
            if statements[-1] == "confirm" or done:
                journal._is_warned = next(warnings)
            return done

        monkeypatch.setattr(journal, "_write", warned)
        journal.append(0, 1, (b"once",))
        # Postgres warns of the commit and of the first confirmation; the second commit finds the batch stored.
        assert statements == ["commit", "confirm", "commit", "confirm"]
        assert [bytes(batch) for batch in journal.batches(0)] == [b"once"]


def test_journal_of_another_epoch_is_not_opened(single: LocalPostgres, shard: int) -> None:
    with connect(single.url, "test") as connection:
        connection.execute("UPDATE headwater.shard SET epoch = 7 WHERE id = %s", [shard])
    for epoch in (6, 8):
        with pytest.raises(WriteFailedError, match=f"its epoch is 7, not {epoch}"):
            journal_of(single.url, shard, epoch=epoch)
    journal_of(single.url, shard, epoch=7).close()


def test_nothing_is_committed_or_renewed_once_the_server_does_not_replicate(single: LocalPostgres, shard: int) -> None:
    with closing(PostgresJournal(single.url, shard, 0)) as journal:
        with pytest.raises(
            WriteFailedError, match="does not replicate synchronously any more; check synchronous_standby_names"
        ):
            journal.append(0, 1, (b"lost with the server",))
        assert list(journal.batches(0)) == []
    with connect(single.url, "test") as connection:
        standing = Ownership("n", "n#1", "127.0.0.1:1", 1.0).turn(connection, Turn({shard: ""}))
    assert "synchronous_standby_names is empty" in standing.problem
    assert standing.held == {}


def test_epoch_is_not_taken_from_a_server_that_stopped_to_replicate(
    single: LocalPostgres, shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is asked before each turn, but may be reconfigured right after that."""
    monkeypatch.setattr("headwater.cluster.nodes.ownership.broken_promise", lambda *_, **__: None)
    now_s = 100.0
    with connect(single.url, "test") as connection:
        before = _epochs(connection)
        ownership = Ownership("n", "n#1", "127.0.0.1:1", 1.0, clock=lambda: now_s)
        now_s += 10
        assert ownership.turn(connection, Turn({})).held == {}
        assert _epochs(connection) == before
        connection.execute("DELETE FROM headwater.node")


def _epochs(connection: psycopg.Connection[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return connection.execute("SELECT id, epoch, owner FROM headwater.shard ORDER BY id").fetchall()
