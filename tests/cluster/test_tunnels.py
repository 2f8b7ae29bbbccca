"""Relayed requests in tunnels: every response belongs to the request that it is given to."""

from __future__ import annotations

import asyncio
import re
import socket
from functools import partial
from typing import Any, cast

import pytest

from headwater.cluster import frames
from headwater.cluster.multi_worker_follow import MultiWorkerFollow
from headwater.cluster.peers import Peer, Peers
from headwater.cluster.relay import Exchange, Relay
from headwater.cluster.relayed import RelayServer
from headwater.config import Settings
from headwater.engine.clock import SteadyClock
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.scheduler import LoopScheduler
from headwater.http.routes import ROUTES
from headwater.http.routing import Router
from headwater.http.server import build_context
from headwater.storage.memory import MemoryStorage
from tests.pressure.clients import byte_position
from tests.waiting import connections_idle

NAME = "/v1/stream/s"


def request(method: str, body: bytes = b"") -> bytes:
    head = f"{method} {NAME} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def status_and_tail(response: bytes) -> tuple[int, int]:
    found = re.search(rb"(?i)stream-next-offset: (\S+)", response)
    assert found is not None, response
    return int(response.split(b" ")[1]), byte_position(found[1].decode())


class Tunnelled:
    """An owner with a stream, and another worker that relays requests to it, in one process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine = Engine(
            MemoryStorage(), SteadyClock(), LoopScheduler(loop), EngineLimits(), commit="inline"
        )
        self.context = context = build_context(Settings(), engine, None, loop, 16)
        self.peers = [Peers(0, 2), Peers(1, 2)]
        relay = Relay(self.peers[0], loop, 1.0)
        router = Router(ROUTES)
        self.server = RelayServer(context, router, router, relay, cast("MultiWorkerFollow", None))
        self.peers[0].open_server = self.server.open

    async def connect(self) -> Peer:
        """The connection to the owner."""
        loop = asyncio.get_running_loop()
        for number, end in enumerate(socket.socketpair()):
            end.setblocking(False)
            peer = self.peers[number].connect(1 - number)
            await loop.create_unix_connection(partial(_itself, peer), sock=end)
            self.peers[number].connected(peer)
        found = self.peers[1].get(0)
        assert found is not None
        return found

    def close(self) -> None:
        for peers in self.peers:
            for peer in peers.all():
                peer.close()


def _itself(peer: Peer) -> Peer:
    return peer


def run(scene: Any) -> None:
    async def main() -> None:
        tunnelled = Tunnelled(asyncio.get_running_loop())
        peer = await tunnelled.connect()
        try:
            async with asyncio.timeout(60):
                await scene(tunnelled, peer)
        finally:
            tunnelled.close()
            await asyncio.sleep(0)

    asyncio.run(main())


async def exchange(peer: Peer, data: bytes) -> tuple[int, int]:
    response, _ = await Exchange(peer, data, frames.BEGIN).response
    return status_and_tail(response)


def test_request_that_crosses_the_drain_of_its_tunnel_gets_its_own_response() -> None:
    async def scene(tunnelled: Tunnelled, peer: Peer) -> None:
        assert await exchange(peer, request("PUT")) == (201, 0)
        # The tunnel is idle now. The owner drains, and a request for the same tunnel is on its way already.
        crossing = Exchange(peer, request("POST", b"one;"), frames.BEGIN)
        tunnelled.server.drain()
        response, _ = await crossing.response
        assert status_and_tail(response) == (204, 4)
        # A mix-up would be seen by the requests after it.
        assert await exchange(peer, request("POST", b"two2;")) == (204, 9)
        assert await exchange(peer, request("HEAD")) == (200, 9)

    run(scene)


def test_response_of_a_draining_owner_says_that_the_connection_is_closed() -> None:
    async def scene(tunnelled: Tunnelled, peer: Peer) -> None:
        assert await exchange(peer, request("PUT")) == (201, 0)
        for number in range(3):
            response, close = await Exchange(peer, request("POST", b"data"), frames.BEGIN).response
            assert (b"\r\nConnection: close\r\n" in response, close) == (False, False)
            assert status_and_tail(response) == (204, 4 * (number + 1))
        tunnelled.context.draining = True
        for number in range(3, 6):
            response, close = await Exchange(peer, request("POST", b"data"), frames.BEGIN).response
            assert (b"\r\nConnection: close\r\n" in response, close) == (True, True)
            assert status_and_tail(response) == (204, 4 * (number + 1))

    run(scene)


@pytest.mark.parametrize("is_last", [True, False])
def test_number_of_a_request_is_not_used_again(is_last: bool) -> None:
    async def scene(tunnelled: Tunnelled, peer: Peer) -> None:
        assert await exchange(peer, request("PUT")) == (201, 0)
        first = request("POST", b"one;")
        if is_last:
            first = first.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        ended = Exchange(peer, first, frames.BEGIN)
        response, close = await ended.response
        assert close == is_last
        assert status_and_tail(response) == (204, 4)
        follower = Exchange(peer, request("POST", b"two2;"), frames.BEGIN)
        assert follower._number != ended._number
        response, _ = await follower.response
        assert status_and_tail(response) == (204, 9)

    run(scene)


def test_request_that_waited_is_checked_again_before_it_is_processed() -> None:
    """A worker that may not answer any more, such as one whose lease has expired, does not process it."""

    class ExpiredError(Exception):
        pass

    def expired() -> None:
        raise ExpiredError

    async def scene(tunnelled: Tunnelled, peer: Peer) -> None:
        assert await exchange(peer, request("PUT")) == (201, 0)
        owner = tunnelled.peers[0].get(1)
        assert owner is not None
        owner.is_congested = True
        waiting = Exchange(peer, request("POST", b"late;"), frames.BEGIN)
        await connections_idle()
        owner.is_congested = False
        (tunnel,) = tunnelled.server._pools[frames.BEGIN].busy
        assert not waiting.response.done()
        tunnelled.peers[0].check = expired
        with pytest.raises(ExpiredError):
            tunnel.resume()
        tunnelled.peers[0].check = None
        assert await exchange(peer, request("HEAD")) == (200, 0)
        waiting.response.cancel()

    run(scene)
