"""Hand over a client's connection to the worker that owns its stream.

Most connections use one stream, so they move once and then need no relay. The socket is passed together with the
request that was read from it, when no other request is in progress on it. A TLS connection cannot move: its keys are
in the process that accepted it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from headwater.cluster.relay import MOVED_MAX_BYTES, Relay, RelayingConnection
from headwater.http.context import Context
from headwater.http.routing import Router

log = logging.getLogger("headwater.cluster")

_ACCEPTED: Final = b"\1"
_REFUSED: Final = b"\0"
"""The answers to a connection that was handed over. No request begins like this."""


class HandedConnection(RelayingConnection):
    """A connection that another worker accepted. Its first request is the one that it was handed over with."""

    __slots__ = ("_first",)

    def __init__(self, context: Context, router: Router, relay: Relay, first: bytes) -> None:
        super().__init__(context, router, relay)
        self._first = first
        self.has_moved = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        first, self._first = self._first, b""
        if not transport.is_closing():
            self.data_received(first)

    def drain(self) -> None:
        self._is_last = True
        if not self._first:  # Otherwise the request that it was handed over with is answered first.
            super().drain()


class _Way:
    """The socket to and from one other worker."""

    __slots__ = ("moving", "opened", "unaccepted")

    def __init__(self, opened: socket.socket) -> None:
        self.opened = opened
        self.moving: deque[tuple[int, bytes]] = deque()
        """Connections that the other worker has not accepted yet: a duplicate of the descriptor, and the request."""
        self.unaccepted: tuple[int | None, bytes] | None = None
        """A received connection whose acceptance cannot be sent yet."""


class HandOver:
    """The sockets over which connections move between this worker and the others.

    The other worker reports that it accepts a connection before it processes the request. If it dies first, the request
    was not processed: this worker keeps the connection, and relays the request when the other one is back.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, make: Callable[[bytes], HandedConnection]) -> None:
        self._loop = loop
        self._make = make
        self._ways: dict[int, _Way] = {}
        self._accepting: set[asyncio.Task[None]] = set()

    def connect(self, worker: int, opened: socket.socket) -> None:
        """Use this socket for connections to and from a worker."""
        self.disconnect(worker)
        opened.setblocking(False)
        way = self._ways[worker] = _Way(opened)
        self._loop.add_reader(opened.fileno(), self._receive, way)

    def disconnect(self, worker: int) -> None:
        """Close the socket, and keep the connections that the other worker did not accept."""
        way = self._ways.pop(worker, None)
        if way is None:
            return
        self._loop.remove_reader(way.opened.fileno())
        self._loop.remove_writer(way.opened.fileno())
        with way.opened:
            with suppress(OSError):
                way.opened.shutdown(socket.SHUT_RDWR)  # From here on, the other worker cannot accept any.
            while (received := _received(way.opened)) is not None and received[0]:
                message, descriptor = received
                if message in (_ACCEPTED, _REFUSED):
                    self._on_answer(way, message)
                elif descriptor is not None:
                    os.close(descriptor)
        if way.unaccepted is not None and way.unaccepted[0] is not None:
            os.close(way.unaccepted[0])
        for descriptor, request in way.moving:
            self._begin(descriptor, request)

    def send(self, worker: int, descriptor: int, request: bytes) -> bool:
        """Pass a connection and its request to a worker; False if that is not possible now."""
        way = self._ways.get(worker)
        if way is None:
            return False
        try:
            kept = os.dup(descriptor)
        except OSError:
            return False
        try:
            socket.send_fds(way.opened, [request], [descriptor])
        except OSError:
            os.close(kept)
            return False
        way.moving.append((kept, request))
        return True

    def _receive(self, way: _Way) -> None:
        while way.unaccepted is None:
            received = _received(way.opened)
            if received is None:
                return
            message, descriptor = received
            if not message:
                # The other worker has closed it. `disconnect` follows, when requests are not relayed to it any more.
                self._loop.remove_reader(way.opened.fileno())
                return
            if message in (_ACCEPTED, _REFUSED):
                self._on_answer(way, message)
            else:
                self._accept(way, message, descriptor)

    def _on_answer(self, way: _Way, answer: bytes) -> None:
        descriptor, request = way.moving.popleft()
        if answer == _ACCEPTED:
            os.close(descriptor)
        else:
            self._begin(descriptor, request)

    def _accept(self, way: _Way, request: bytes, descriptor: int | None) -> None:
        """Report the acceptance, then process the request. Without a descriptor there was none free to receive it."""
        try:
            way.opened.send(_REFUSED if descriptor is None else _ACCEPTED)
        except BlockingIOError:
            way.unaccepted = descriptor, request
            self._loop.remove_reader(way.opened.fileno())
            self._loop.add_writer(way.opened.fileno(), self._accept_later, way)
        except OSError:
            if descriptor is not None:
                os.close(descriptor)  # The other worker keeps it.
        else:
            if descriptor is not None:
                self._begin(descriptor, request)

    def _accept_later(self, way: _Way) -> None:
        assert way.unaccepted is not None
        (descriptor, request), way.unaccepted = way.unaccepted, None
        self._loop.remove_writer(way.opened.fileno())
        self._loop.add_reader(way.opened.fileno(), self._receive, way)
        self._accept(way, request, descriptor)

    def _begin(self, descriptor: int, request: bytes) -> None:
        task = self._loop.create_task(self._open(descriptor, request))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _open(self, descriptor: int, request: bytes) -> None:
        connection = socket.socket(fileno=descriptor)
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: self._make(request), connection)
        except OSError as error:
            connection.close()
            log.warning("a connection from another worker could not be accepted: %s", error)


def _received(opened: socket.socket) -> tuple[bytes, int | None] | None:
    """The next message with its descriptor; empty at the end, None if there is none yet."""
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(opened, MOVED_MAX_BYTES, 1)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            continue  # It is reported once, before what the other worker had sent.
        except OSError:
            return b"", None
        return message, descriptors[0] if descriptors else None
