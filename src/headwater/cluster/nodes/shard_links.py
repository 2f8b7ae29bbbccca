"""TCP connections between the processes of shards on all nodes; both sides prove that they know the secret.

The process of the higher shard connects to that of the lower one. After the greeting, what `peers` sends between the
workers of one machine is sent here. The secret itself is never sent. With TLS (`link_tls`), the greeting and everything
after it is encrypted; without it, what follows the greeting is neither encrypted nor signed, so the nodes belong in a
private network.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import ssl
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from headwater.cluster.nodes.link_tls import LinkTls, explained, fingerprint_of
from headwater.cluster.peers import Peers
from headwater.operating_system import SYSTEM

log = logging.getLogger("headwater.cluster")

GREETING_S: Final = 3.0
"""Timeout of the greeting."""
ACCEPT_AGAIN_S: Final = 0.2
"""The pause after a connection could not be accepted, as without a free file descriptor."""
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_HELLO_MAX_BYTES: Final = 512
_IDLE_S: Final = 2
_UNANSWERED_S: Final = 5
_TLS_HELLO: Final = b"\x16\x03"
"""The first bytes of a side that uses TLS."""
_FAILURES: Final = (OSError, TimeoutError, EOFError, ValueError)


class _Introduction(msgspec.Struct, frozen=True):
    sender: int
    sender_epoch: int
    receiver: int
    receiver_epoch: int


_introductions: Final = msgspec.json.Decoder(_Introduction)


class RefusedError(Exception):
    """The other side could not prove its identity."""


class _Greeting(asyncio.Protocol):
    """A connection until both sides know each other; then a peer takes it over."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._data = b""
        self._is_lost = False
        self._changed = asyncio.Event()
        self.begins_with = b""
        """The first bytes that were received."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.begins_with = self.begins_with or data[: len(_TLS_HELLO)]
        self._data += data
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._changed.set()

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    async def receive(self, size: int) -> bytes:
        while len(self._data) < size:
            if self._is_lost:
                raise EOFError("it closed the connection")
            self._changed.clear()
            await self._changed.wait()
        data, self._data = self._data[:size], self._data[size:]
        return data

    def certificate(self) -> bytes:
        """The digest of the other side's certificate; empty without TLS."""
        opened = self._transport.get_extra_info("ssl_object")
        return b"" if opened is None else fingerprint_of(opened.getpeercert(binary_form=True))

    def become(self, peers: Peers, shard: int) -> None:
        """Let the peer take the connection over."""
        if self._is_lost:
            raise EOFError("it closed the connection")
        peer = peers.connect(shard)
        self._transport.set_protocol(peer)
        peer.connection_made(self._transport)
        peers.connected(peer)
        if self._data:
            peer.data_received(self._data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class ShardLinks:
    """The links of one shard's process."""

    def __init__(self, peers: Peers, epoch: int, secret: str, tls: LinkTls | None = None) -> None:
        self._peers = peers
        self._epoch = epoch
        self._secret = secret.encode()
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._epochs: dict[int, int] = {}
        """The known epochs of the other shards."""
        self._linked: dict[int, int] = {}
        """The epoch of the last link to each shard."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._dialing: set[int] = set()
        self._problems: dict[int, str] = {}
        """The last problem with the identity of each shard, which is logged once."""
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
        greeting = _Greeting()
        opened: socket.socket | None = None
        try:
            async with asyncio.timeout(GREETING_S):
                host, _, port = address.rpartition(":")
                found = await self._loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
                opened = _socket(found[0][0])
                await self._loop.sock_connect(opened, found[0][4])
                ours = b""
                if self._tls is not None:
                    ours, context = self._tls.fingerprint(), self._tls.context(accepts=False)
                    await self._loop.create_connection(
                        lambda: greeting, sock=opened, ssl=context, server_hostname=host.strip("[]")
                    )
                else:
                    await self._loop.create_connection(lambda: greeting, sock=opened)
                opened = None
                introduction = _Introduction(self._peers.worker, self._epoch, shard, epoch)
                await self._greet(greeting, introduction, greeting.certificate() + ours)
            self._linked[shard] = epoch
            self._problems.pop(shard, None)
            greeting.become(self._peers, shard)
        except (*_FAILURES, RefusedError) as error:
            self._report(shard, address, error)
            greeting.abort()
        finally:
            self._dialing.discard(shard)
            if opened is not None:
                opened.close()

    def _report(self, shard: int, address: str, error: Exception) -> None:
        problem = explained(error) if isinstance(error, ssl.SSLError) else str(error)
        is_new = isinstance(error, ssl.SSLError | RefusedError) and self._problems.get(shard) != problem
        self._problems[shard] = problem
        level = logging.ERROR if is_new else logging.DEBUG
        log.log(level, "shard %d at %s cannot be linked: %s", shard, address, problem)

    async def _greet(self, greeting: _Greeting, introduction: _Introduction, certificates: bytes) -> None:
        theirs = await greeting.receive(_NONCE_BYTES)
        ours = secrets.token_bytes(_NONCE_BYTES)
        said = msgspec.json.encode(introduction).ljust(_HELLO_MAX_BYTES)
        nonces = theirs + ours + certificates
        greeting.send(ours + said + self._proof(b"connects", nonces, said))
        proof = await greeting.receive(_PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(b"accepts", nonces, said)):
            raise RefusedError("it did not prove that it knows cluster.secret; set the same secret on every node")

    # -- the side that accepts -------------------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                opened, _ = await self._loop.sock_accept(listening)
            except OSError as error:
                log.warning("connections of other nodes cannot be accepted at the moment: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            _set_up(opened)
            self._run(self._receive_link(opened))

    async def _receive_link(self, opened: socket.socket) -> None:
        greeting = _Greeting()
        is_connected = False
        try:
            async with asyncio.timeout(GREETING_S):
                certificates = b""
                if self._tls is not None:
                    certificates, context = self._tls.fingerprint(), self._tls.context(accepts=True)
                    await self._loop.connect_accepted_socket(lambda: greeting, opened, ssl=context)
                    certificates += greeting.certificate()
                else:
                    await self._loop.connect_accepted_socket(lambda: greeting, opened)
                is_connected = True
                found = await self._identify(greeting, certificates)
            greeting.become(self._peers, found.sender)
        except (*_FAILURES, RefusedError, msgspec.MsgspecError) as error:
            log.warning("a connection of another node was refused: %s", self._refusal(error, greeting, is_connected))
            greeting.abort()
            if not is_connected:
                opened.close()

    def _refusal(self, error: Exception, greeting: _Greeting, is_connected: bool) -> str:
        if isinstance(error, ssl.SSLError):
            return explained(error)
        if self._tls is not None and not is_connected:
            return f"it did not begin TLS ({str(error) or 'within the time'}). Set cluster.tls_cert_path on every node"
        if self._tls is None and greeting.begins_with == _TLS_HELLO:
            return "it uses TLS, and this node does not. Set cluster.tls_cert_path on every node"
        return str(error) or f"it did not prove its identity within {GREETING_S:g} seconds"

    async def _identify(self, greeting: _Greeting, certificates: bytes) -> _Introduction:
        """Authenticate both sides with the secret, and return the introduction of the other side."""
        ours = secrets.token_bytes(_NONCE_BYTES)
        greeting.send(ours)
        theirs = await greeting.receive(_NONCE_BYTES)
        said = await greeting.receive(_HELLO_MAX_BYTES)
        proof = await greeting.receive(_PROOF_BYTES)
        nonces = ours + theirs + certificates
        if not hmac.compare_digest(proof, self._proof(b"connects", nonces, said)):
            raise RefusedError("it did not prove that it knows cluster.secret; set the same secret on every node")
        found = _introductions.decode(said.rstrip())
        if (found.receiver, found.receiver_epoch) != (self._peers.worker, self._epoch):
            raise RefusedError(f"it looks for shard {found.receiver}, epoch {found.receiver_epoch}")
        if found.sender_epoch < self._epochs.get(found.sender, 0):
            raise RefusedError(f"shard {found.sender} has another owner")
        greeting.send(self._proof(b"accepts", nonces, said))
        return found

    # -- both ------------------------------------------------------------------------------------------------------

    def _proof(self, side: bytes, nonces: bytes, said: bytes) -> bytes:
        """`nonces` are those of the accepting and the connecting side, then the digests of their certificates."""
        return hmac.digest(self._secret, side + nonces + said, "sha256")


def _socket(family: int) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    _set_up(opened)
    return opened


def _set_up(opened: socket.socket) -> None:
    opened.setblocking(False)
    with suppress(OSError):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        SYSTEM.detect_lost_peer(opened, _IDLE_S, _UNANSWERED_S)
