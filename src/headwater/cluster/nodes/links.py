"""TCP connections between the processes of shards on all nodes; both sides prove that they know the secret.

The process of the higher shard connects to that of the lower one. After the greeting, what `peers` sends between the
workers of one machine is sent here. The secret itself is never sent; what follows the greeting is neither encrypted nor
signed, so the nodes belong in a private network.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from headwater.cluster.peers import Peer, Peers
from headwater.operating_system import SYSTEM

log = logging.getLogger("headwater.cluster")

GREETING_S: Final = 3.0
"""Timeout of the greeting."""
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_HELLO_MAX_BYTES: Final = 512
_IDLE_S: Final = 2
_UNANSWERED_S: Final = 5


class _Introduction(msgspec.Struct, frozen=True):
    sender: int
    sender_epoch: int
    receiver: int
    receiver_epoch: int


class RefusedError(Exception):
    """The other side could not prove its identity."""


class ShardLinks:
    """The links of one shard's process."""

    def __init__(self, peers: Peers, epoch: int, secret: str) -> None:
        self._peers = peers
        self._epoch = epoch
        self._secret = secret.encode()
        self._loop = asyncio.get_running_loop()
        self._epochs: dict[int, int] = {}
        """The known epochs of the other shards."""
        self._linked: dict[int, int] = {}
        """The epoch of the last link to each shard."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._dialing: set[int] = set()
        self._listening: socket.socket | None = None

    def listen(self, host: str, port: int) -> int:
        """Accept links; returns the port."""
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = self._listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(64)
        listening.setblocking(False)
        self._run(self._accept(listening))
        bound: int = listening.getsockname()[1]
        return bound

    def connect_to(self, owners: Mapping[int, tuple[int, str]]) -> None:
        """Link to the lower shards of this map that are not linked, or have another owner now."""
        for shard, (epoch, address) in owners.items():
            self._epochs[shard] = max(epoch, self._epochs.get(shard, 0))
            is_linked = self._peers.get(shard) is not None and self._linked.get(shard) == epoch
            if shard < self._peers.worker and not is_linked and shard not in self._dialing:
                self._dialing.add(shard)
                self._run(self._dial(shard, epoch, address))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._listening is not None:
            self._listening.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the side that connects ------------------------------------------------------------------------------------

    async def _dial(self, shard: int, epoch: int, address: str) -> None:
        opened: socket.socket | None = None
        is_used = False
        try:
            async with asyncio.timeout(GREETING_S):
                host, _, port = address.rpartition(":")
                found = await self._loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
                opened = _socket(found[0][0])
                await self._loop.sock_connect(opened, found[0][4])
                await self._greet(opened, _Introduction(self._peers.worker, self._epoch, shard, epoch))
            self._linked[shard] = epoch
            is_used = True
            await self._use(opened, shard, is_ours=True)
        except (OSError, TimeoutError, RefusedError, EOFError) as error:
            log.debug("shard %d at %s cannot be linked yet: %s", shard, address, error)
        finally:
            self._dialing.discard(shard)
            if opened is not None and not is_used:
                opened.close()

    async def _greet(self, opened: socket.socket, introduction: _Introduction) -> None:
        theirs = await self._receive(opened, _NONCE_BYTES)
        ours = secrets.token_bytes(_NONCE_BYTES)
        said = msgspec.json.encode(introduction).ljust(_HELLO_MAX_BYTES)
        await self._loop.sock_sendall(opened, ours + said + self._proof(b"connects", theirs, ours, said))
        proof = await self._receive(opened, _PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(b"accepts", theirs, ours, said)):
            raise RefusedError("it does not know the secret")

    # -- the side that accepts -------------------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            opened, _ = await self._loop.sock_accept(listening)
            _set_up(opened)
            self._run(self._receive_link(opened))

    async def _receive_link(self, opened: socket.socket) -> None:
        is_used = False
        try:
            async with asyncio.timeout(GREETING_S):
                ours = secrets.token_bytes(_NONCE_BYTES)
                await self._loop.sock_sendall(opened, ours)
                theirs = await self._receive(opened, _NONCE_BYTES)
                said = await self._receive(opened, _HELLO_MAX_BYTES)
                proof = await self._receive(opened, _PROOF_BYTES)
                if not hmac.compare_digest(proof, self._proof(b"connects", ours, theirs, said)):
                    raise RefusedError("it does not know the secret")
                found = msgspec.json.decode(said.rstrip(), type=_Introduction)
                if (found.receiver, found.receiver_epoch) != (self._peers.worker, self._epoch):
                    raise RefusedError(f"it looks for shard {found.receiver}, epoch {found.receiver_epoch}")
                if found.sender_epoch < self._epochs.get(found.sender, 0):
                    raise RefusedError(f"shard {found.sender} has another owner")
                await self._loop.sock_sendall(opened, self._proof(b"accepts", ours, theirs, said))
            is_used = True
            await self._use(opened, found.sender, is_ours=False)
        except (OSError, TimeoutError, RefusedError, EOFError, msgspec.MsgspecError) as error:
            log.warning("a connection of another node was refused: %s", error)
        finally:
            if not is_used:
                opened.close()

    # -- both ------------------------------------------------------------------------------------------------------

    async def _use(self, opened: socket.socket, shard: int, *, is_ours: bool) -> None:
        peer: Peer = self._peers.connect(shard)
        if is_ours:
            await self._loop.create_connection(lambda: peer, sock=opened)
        else:
            await self._loop.connect_accepted_socket(lambda: peer, opened)
        if not peer.is_lost:
            self._peers.connected(peer)

    async def _receive(self, opened: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await self._loop.sock_recv(opened, size - len(data))
            if not piece:
                raise EOFError("it closed the connection")
            data += piece
        return data

    def _proof(self, side: bytes, accepting: bytes, connecting: bytes, said: bytes) -> bytes:
        return hmac.digest(self._secret, side + accepting + connecting + said, "sha256")


def _socket(family: int) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    _set_up(opened)
    return opened


def _set_up(opened: socket.socket) -> None:
    opened.setblocking(False)
    with suppress(OSError):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        SYSTEM.detect_lost_peer(opened, _IDLE_S, _UNANSWERED_S)
