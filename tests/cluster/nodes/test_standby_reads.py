"""Reads from a warm standby: never older than what was acknowledged, never what could still be lost."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import uvloop

from headwater.cluster import messages
from headwater.cluster.nodes import standby_reads
from headwater.cluster.nodes.node_worker import NodeWorker
from headwater.cluster.nodes.postgres_journal import PostgresJournal
from headwater.cluster.nodes.standby import CommittedPosition, StandbyJournal
from headwater.cluster.nodes.standby_reads import OwnerPosition
from headwater.cluster.relay import Exchange
from headwater.cluster.shards import ShardMap
from headwater.config import Settings
from headwater.http.server import Reloader
from headwater.stack.database import LocalPostgres
from headwater.storage.filesystem import Bytes
from tests.cluster.nodes.standby_scene import (
    StandbyScene,
    body_of,
    offset_of,
    request,
    standby_scene,
    status_of,
)
from tests.cluster.nodes.test_standby import lose_last_batch
from tests.crash.workload import Violation
from tests.pressure.history import check
from tests.storage.tiering.objects import memory_objects
from tests.waiting import async_wait_until

Run: TypeAlias = Callable[..., None]


@pytest.fixture
def run(single: LocalPostgres, shard: int, tmp_path: Path) -> Run:
    def run_scene(scene: Callable[[StandbyScene], Awaitable[None]], *, waits_for_owner: bool = True) -> None:
        async def main() -> None:
            async with (
                asyncio.timeout(120),
                standby_scene(single, shard, tmp_path, memory_objects(), waits_for_owner=waits_for_owner) as opened,
            ):
                await scene(opened)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    return run_scene


async def answers_at_once(_self: OwnerPosition) -> bool:
    """The broken variant: the owner is not asked, and the answer is what the standby happens to have."""
    return True


@pytest.mark.parametrize("is_broken", [False, True])
def test_every_read_has_what_was_acknowledged_before(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    async def scene(opened: StandbyScene) -> None:
        # From now on it reads the journal only when a read wakes it.
        monkeypatch.setattr(standby_reads, "FOLLOW_S", 3600.0)
        await opened.create("s")
        await opened.append("s", b"first;")
        assert await opened.read("s") == b"first;"
        if is_broken:
            monkeypatch.setattr(OwnerPosition, "is_current", answers_at_once)
        written = b"first;"
        for number in range(20):
            await opened.append("s", b"%d;" % number)
            written += b"%d;" % number
            assert await opened.read("s") == (b"first;" if is_broken else written)
        if is_broken:
            with pytest.raises(Violation, match="after"):
                check(opened.history, {"s": written})
        else:
            check(opened.history, {"s": written})

    run(scene)


@pytest.mark.parametrize("is_broken", [False, True])
def test_batch_whose_replication_is_unknown_is_not_shown(
    run: Run, single: LocalPostgres, shard: int, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """It can be read on the primary, and is lost with it. The broken variant applies every row that it finds."""
    shown = b"first;not replicated;" if is_broken else b"first;"
    append = PostgresJournal.append
    may_return = threading.Event()

    def append_and_wait(self: PostgresJournal, last_lsn: int, new_lsn: int, frame: Sequence[Bytes]) -> None:
        append(self, last_lsn, new_lsn, frame)
        if any(b"not replicated;" in bytes(part) for part in frame):
            may_return.wait(120)

    monkeypatch.setattr(PostgresJournal, "append", append_and_wait)

    async def scene(opened: StandbyScene) -> None:
        await opened.create("s")
        await opened.append("s", b"first;")
        unknown = asyncio.create_task(opened.append("s", b"not replicated;"))
        try:
            await async_wait_until(opened.last_lsn, lambda lsn: lsn == 3, what="the row in Postgres")
            if is_broken:
                await async_wait_until(lambda: opened.storage.applied_lsn == 3, what="the row at the standby")
            assert {await opened.read("s") for _ in range(20)} == {shown}
        finally:
            lose_last_batch(single, shard)
            unknown.cancel()
            may_return.set()
        async with opened.owned(2):
            await opened.append("s", b"of the next owner;")
            content = {"s": b"first;of the next owner;"}
            if is_broken:
                with pytest.raises(Violation, match="no longer there"):
                    check(opened.history, content)
            else:
                assert await opened.read("s") == content["s"]
                check(opened.history, content)

    run(scene, waits_for_owner=not is_broken)


@pytest.mark.parametrize(
    ("confirmed", "readable", "applied"),
    [
        ((0, 0), (1, 7, 5), 5),  # Nothing is confirmed: all but the last batch.
        ((1, 7), (1, 7, 5), 7),
        ((1, 5), (1, 7, 5), 5),
        ((1, 7), (1, 5, 3), 5),  # What is confirmed cannot be read here yet.
        ((1, 7), (2, 9, 7), 7),
        ((2, 7), (1, 7, 5), 5),  # A former primary: its batch 7 may be another one.
        ((1, 9), (1, 9, 0), 9),  # The others were trimmed.
    ],
)
def test_only_replicated_batches_are_applied(
    confirmed: tuple[int, int], readable: tuple[int, int, int], applied: int
) -> None:
    journal = StandbyJournal("postgresql://", 0, waits_for_owner=True)
    journal.confirm(CommittedPosition(*confirmed))
    assert journal._replicated(*readable) == applied


def test_live_readers_of_a_standby_get_what_is_appended(run: Run) -> None:
    async def scene(opened: StandbyScene) -> None:
        await opened.create("s")
        await opened.append("s", b"first;")
        events = Exchange(opened.standby, request("GET", "s?offset=-1&live=sse"), 1)
        await async_wait_until(lambda: b"first;" in b"".join(events._data), what="the first event")
        for number in range(5):
            await opened.append("s", b"event %d;" % number)
            await async_wait_until(lambda number=number: b"event %d;" % number in b"".join(events._data))  # type: ignore[misc]
        head = await opened.asked(opened.standby, "HEAD", "s")
        assert head is not None
        poll = asyncio.create_task(opened.asked(opened.standby, "GET", f"s?offset={offset_of(head)}&live=long-poll"))
        await async_wait_until(lambda: opened.engine.metrics.followers["long-poll"])
        await opened.append("s", b"awaited;")
        response = await poll
        assert response is not None
        assert body_of(response) == b"awaited;"
        events.response.cancel()

    run(scene)


def test_heir_has_no_count_of_the_requests_that_were_counted_where_the_clients_are(run: Run) -> None:
    counted = []

    async def scene(opened: StandbyScene) -> None:
        await opened.create("s")
        await opened.append("s", b"first;")
        await opened.read("s")
        counted.append(opened.engine.metrics)
        assert counted[0].requests == {("read", 200): 1}

    run(scene)
    assert not counted[0].requests
    assert not counted[0].request_seconds


def test_end_of_a_stream_ends_its_readers_and_a_closed_one_is_closed_here(run: Run) -> None:
    async def scene(opened: StandbyScene) -> None:
        await opened.create("s")
        await opened.append("s", b"first;")
        events = Exchange(opened.standby, request("GET", "s?offset=-1&live=sse"), 1)
        await async_wait_until(lambda: b"first;" in b"".join(events._data))
        await opened.asked(opened.owner, "DELETE", "s")
        await asyncio.wait((events.response,))
        assert await opened.asked(opened.standby, "GET", "s") is None, "the owner says that it is gone"
        await opened.create("s")
        await opened.asked(opened.owner, "POST", "s", b"again;", **{"Stream-Closed": "true"})
        response = await opened.asked(opened.standby, "GET", "s?offset=-1")
        assert response is not None
        assert body_of(response) == b"again;"
        assert b"stream-closed: true" in response.lower()

    run(scene)


def test_standby_declines_what_only_the_owner_can_answer(run: Run) -> None:
    async def scene(opened: StandbyScene) -> None:
        await opened.create("s")
        await opened.append("s", b"first;")
        await opened.create("mortal", **{"Stream-TTL": "3600"})
        await opened.create("dated", **{"Stream-Expires-At": "2999-01-01T00:00:00Z"})
        for method, target in (
            ("GET", "missing"),
            ("GET", "mortal"),
            ("HEAD", "mortal"),
            ("GET", "dated"),
            ("GET", "s?offset=wrong"),
            ("GET", "s?offset=-1&live=wrong"),
            ("GET", "s?offset=&live=sse"),
            ("POST", "s"),
            ("DELETE", "s"),
            ("PUT", "new"),
        ):
            assert await opened.asked(opened.standby, method, target) is None, (method, target)
        response = await opened.asked(opened.standby, "GET", "s?offset=-1")
        assert response is not None
        assert body_of(response) == b"first;"

    run(scene)


def test_responses_are_those_of_the_owner(run: Run) -> None:
    """Whatever the owner did: forks, deletions, closed streams, data in packs of several manifests."""

    async def scene(opened: StandbyScene) -> None:
        dice = random.Random(7)
        names = [f"s{number}" for number in range(6)]
        for name in names[:3]:
            await opened.create(name)
        compared = 0
        for step in range(60):
            name = dice.choice(names)
            kind = dice.choice(("append", "append", "append", "fork", "delete", "store"))
            if kind == "append":
                body = b"%d;" % step * dice.randrange(1, 3000)
                await opened.asked(opened.owner, "POST", name, body)
            elif kind == "fork":
                source = dice.choice(names)
                await opened.asked(opened.owner, "PUT", name, b"", **{"Stream-Forked-From": f"/v1/stream/{source}"})
            elif kind == "delete" and dice.random() < 0.5:
                await opened.asked(opened.owner, "DELETE", name)
            elif kind == "store":
                opened.owners_storage.checkpoint_soon()
            for read in names:
                compared += await same_response(opened, read, dice)
        assert compared > 100
        assert opened.storage._recovery is not None
        assert opened.storage._recovery.head.parts, "nothing was read from packs"

    run(scene)


async def same_response(opened: StandbyScene, name: str, dice: random.Random) -> bool:
    """Compare a read; returns whether the standby answered."""
    method = dice.choice(("GET", "GET", "HEAD"))
    target = f"{name}?offset=-1" if method == "GET" else name
    expected = await opened.asked(opened.owner, method, target)
    assert expected is not None
    found = await opened.asked(opened.standby, method, target)
    if found is None:
        assert status_of(expected) >= 400, (method, target)
        return False
    assert _without_date(found) == _without_date(expected)
    return True


def _without_date(response: bytes) -> list[bytes]:
    head, _, body = response.partition(b"\r\n\r\n")
    return [*(line for line in head.split(b"\r\n") if not line.lower().startswith(b"date:")), body]


def test_standby_that_is_late_declines_at_once_until_it_has_caught_up(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_reads, "CURRENT_S", 0.2)
    asked: list[object] = []
    ask = OwnerPosition._ask

    async def ask_and_count(self: OwnerPosition, after_lsn: int | None) -> CommittedPosition:
        asked.append(after_lsn)
        return await ask(self, after_lsn)

    monkeypatch.setattr(OwnerPosition, "_ask", ask_and_count)

    async def scene(opened: StandbyScene) -> None:
        await opened.create("s")
        await opened.append("s", b"first;")
        assert await opened.read("s") == b"first;"
        with monkeypatch.context() as cut_off:
            cut_off.setattr(StandbyJournal, "last_lsn", lambda _: None)
            await opened.append("s", b"second;")
            asked.clear()
            assert [await opened.asked(opened.standby, "GET", "s?offset=-1") for _ in range(3)] == [None] * 3
            assert asked == [None], "only the first read waited"
        await async_wait_until(lambda: opened.storage.applied_lsn == 3)
        assert await opened.read("s") == b"first;second;"

    run(scene)


def test_owner_that_does_not_answer_gets_the_read_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_reads, "CURRENT_S", 0.2)

    async def scene(opened: StandbyScene) -> None:
        await opened.create("s")
        await opened.append("s", b"first;")
        assert await opened.read("s") == b"first;"
        async with opened.owned(2, answers=False):
            assert await opened.asked(opened.standby, "GET", "s?offset=-1") is None
        assert await opened.asked(opened.standby, "GET", "s?offset=-1") is None, "the shard has no owner"

    run(scene)


def test_standby_that_becomes_the_owner_while_a_reader_is_connected_has_no_connection_to_it() -> None:
    """Neither as a reader, nor as a standby of the reader's shard."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        control, ended = messages.pair()
        settings, lease = Settings(), messages.ShardLease(0.0, {})
        worker = NodeWorker(
            settings, Reloader(lambda: settings), 0, ShardMap(2, 2), [ours], control, epoch=None, lease=lease, host=""
        )
        connecting = asyncio.create_task(worker._connect_local(messages.ConnectReader(1), theirs.detach()))
        await asyncio.sleep(0)
        worker._on_take_over(1)
        await connecting
        assert not worker._readers.all()
        assert not worker._standbys.all()
        assert await asyncio.to_thread(ours.recv, 1) == b"", "the other end sees that it is closed"
        for end in (ours, control, ended):
            end.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), 60))
