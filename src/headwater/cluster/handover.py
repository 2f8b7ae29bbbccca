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
from collections.abc import Callable

from headwater.cluster.relay import MOVED_MAX_BYTES, Relay, RelayingConnection
from headwater.http.context import Context
from headwater.http.routing import Router

log = logging.getLogger("headwater.cluster")


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


class HandOver:
    """The sockets over which connections move between this worker and the others."""

    def __init__(self, loop: asyncio.AbstractEventLoop, make: Callable[[bytes], HandedConnection]) -> None:
        self._loop = loop
        self._make = make
        self._sockets: dict[int, socket.socket] = {}
        self._accepting: set[asyncio.Task[None]] = set()

    def connect(self, worker: int, opened: socket.socket) -> None:
        """Use this socket for connections to and from a worker."""
        self.disconnect(worker)
        opened.setblocking(False)
        self._sockets[worker] = opened
        self._loop.add_reader(opened.fileno(), self._receive, worker, opened)

    def disconnect(self, worker: int) -> None:
        opened = self._sockets.pop(worker, None)
        if opened is not None:
            self._loop.remove_reader(opened.fileno())
            opened.close()

    def send(self, worker: int, descriptor: int, request: bytes) -> bool:
        """Pass a connection and its request to a worker; False if that is not possible now."""
        opened = self._sockets.get(worker)
        if opened is None:
            return False
        try:
            socket.send_fds(opened, [request], [descriptor])
        except OSError:
            return False
        return True

    def _receive(self, worker: int, opened: socket.socket) -> None:
        while True:
            try:
                request, descriptors, _, _ = socket.recv_fds(opened, MOVED_MAX_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                self.disconnect(worker)
                return
            if not request or not descriptors:
                if not request:
                    self.disconnect(worker)
                for descriptor in descriptors:
                    os.close(descriptor)
                return
            task = self._loop.create_task(self._accept(descriptors[0], request))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)

    async def _accept(self, descriptor: int, request: bytes) -> None:
        connection = socket.socket(fileno=descriptor)
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: self._make(request), connection)
        except OSError as error:
            connection.close()
            log.warning("a connection from another worker could not be accepted: %s", error)
