"""Links between the processes of shards: only a process that knows the secret is connected, with TLS if that is set."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from headwater.cluster.nodes.link_tls import LinkTls
from headwater.cluster.nodes.shard_links import ShardLinks
from headwater.cluster.peers import Peers
from tests.waiting import async_wait_until

SECRET = "the secret of the test"


async def _answer(sender: int, arguments: Any) -> list[Any]:
    return [sender, arguments]


class Process:
    """The part of a shard's process that connects to the other shards."""

    def __init__(self, shard: int, secret: str = SECRET, epoch: int = 1, tls: LinkTls | None = None) -> None:
        self.peers = Peers(shard, 3)
        self.peers.answers("echo", _answer)
        self.links = ShardLinks(self.peers, epoch, secret, tls)
        self.shard = shard
        self.epoch = epoch
        self.address = f"127.0.0.1:{self.links.listen('127.0.0.1', 0)}"

    def close(self) -> None:
        self.links.close()
        for peer in self.peers.all():
            peer.close()


def owners(*processes: Process) -> dict[int, tuple[int, str]]:
    return {process.shard: (process.epoch, process.address) for process in processes}


async def link(first: Process, second: Process) -> None:
    known = owners(first, second)

    def is_linked() -> bool:
        for process in (first, second):
            process.links.connect_to(known)
        return first.peers.get(second.shard) is not None and second.peers.get(first.shard) is not None

    await async_wait_until(is_linked, what="the link")


def test_shards_are_linked_and_ask_each_other_in_both_directions() -> None:
    async def scene() -> None:
        low, high = Process(0), Process(2)
        try:
            await link(low, high)
            assert await low.peers.ask(2, "echo", "down") == [0, "down"]
            assert await high.peers.ask(0, "echo", "up") == [2, "up"]
        finally:
            low.close()
            high.close()

    asyncio.run(scene())


def test_process_without_a_free_descriptor_accepts_links_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "Too many open files")]

        async def failing(listening: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", failing)
        low, high = Process(0), Process(2)
        try:
            await link(low, high)
            assert not failures
        finally:
            low.close()
            high.close()

    asyncio.run(scene())


def test_link_that_breaks_is_made_again_and_a_new_owner_replaces_the_old() -> None:
    async def scene() -> None:
        low, high = Process(0), Process(2)
        await link(low, high)
        broken = low.peers.get(2)
        assert broken is not None
        broken.close()
        await async_wait_until(lambda: high.peers.get(0) is None, what="the end of the link")
        await link(low, high)
        heir = Process(2, epoch=2)
        lost: list[int] = []
        low.peers.on_disconnected.append(lost.append)
        try:
            await link(low, heir)
            await async_wait_until(lambda: lost, what="the report of the end of the old link")
            assert await low.peers.ask(2, "echo", 1) == [0, 1]
            await async_wait_until(lambda: high.peers.get(0) is None, what="the end of the old owner's link")
        finally:
            for process in (low, high, heir):
                process.close()

    asyncio.run(scene())


@pytest.mark.parametrize("wrong", ["the secret of another one", ""])
def test_process_that_does_not_know_the_secret_is_refused(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        low, stranger = Process(0), Process(2, wrong)
        try:
            stranger.links.connect_to(owners(low))
            await async_wait_until(
                lambda: "did not prove that it knows cluster.secret" in caplog.text, what="the refusal"
            )
            assert low.peers.get(2) is None
            assert stranger.peers.get(0) is None
        finally:
            low.close()
            stranger.close()

    asyncio.run(scene())


def test_process_of_an_earlier_epoch_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        low, former = Process(0), Process(2, epoch=1)
        low.links.connect_to({2: (2, "127.0.0.1:1")})
        try:
            former.links.connect_to(owners(low))
            await async_wait_until(lambda: "has another owner" in caplog.text, what="the refusal")
            assert low.peers.get(2) is None
        finally:
            low.close()
            former.close()

    asyncio.run(scene())
