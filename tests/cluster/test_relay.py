"""A request that another worker processes waits for it once in total, and is sent again at most once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from headwater.cluster import frames
from headwater.cluster.peers import Peer, PeerLostError, Peers
from headwater.cluster.relay import RETRIES, Relay, RelayedAnswer, RelayingConnection
from headwater.core.errors import Refusal, WorkerUnavailable

WAIT_S = 0.3


class DyingPeer(Peer):
    """The connection to a worker that dies when it processes something."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(1, peers)
        self._transport = asyncio.Transport()
        peers.connected(self)

    def _flush(self) -> None:
        """Send nothing."""

    def die(self) -> None:
        self.connection_lost(None)


class WaitingClient:
    """The connection of a client that waits for one response."""

    origin = b"\0"
    refusal: Refusal | None = None

    def __init__(self) -> None:
        self.is_refused = asyncio.Event()

    def refuse(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self.is_refused.set()


def run(scene: Callable[[Relay], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene(Relay(Peers(0, 2), asyncio.get_running_loop(), WAIT_S))

    asyncio.run(main())


def read(relay: Relay, client: WaitingClient) -> RelayedAnswer:
    answer = RelayedAnswer(relay, 1, b"GET /v1/stream/s HTTP/1.1\r\n\r\n", True, frames.BEGIN)
    answer._channel = cast(RelayingConnection, client)
    answer._send()
    return answer


def test_read_that_ends_its_owner_is_not_retried_for_ever() -> None:
    async def scene(relay: Relay) -> None:
        client = WaitingClient()
        read(relay, client)
        for _ in range(1 + RETRIES):
            assert client.refusal is None
            DyingPeer(relay.peers).die()
        assert isinstance(client.refusal, WorkerUnavailable)

    run(scene)


def test_read_waits_once_in_total_for_its_owner() -> None:
    async def scene(relay: Relay) -> None:
        client = WaitingClient()
        answer = read(relay, client)
        assert answer._deadline is not None
        # As if half of the wait had passed.
        answer._deadline.at_s -= WAIT_S / 2
        until_s = answer._deadline.at_s
        DyingPeer(relay.peers).die()
        assert answer._deadline.at_s == pytest.approx(until_s, abs=WAIT_S / 10)
        await client.is_refused.wait()
        assert isinstance(client.refusal, WorkerUnavailable)

    run(scene)


def test_question_that_ends_a_worker_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def ask(peer: Peer, question: str, arguments: object = None) -> object:
        nonlocal asked
        asked += 1
        raise PeerLostError("worker 1 ended")

    async def scene(relay: Relay) -> None:
        monkeypatch.setattr(Peer, "ask", ask)
        DyingPeer(relay.peers)
        with pytest.raises(WorkerUnavailable):
            async with asyncio.timeout(60):
                await relay.ask(1, "any")
        assert asked == 1 + RETRIES

    run(scene)
