"""Answer clients with 503 while a node has no process that serves.

The supervisor does this between its other work, and while Postgres is unavailable all clients may connect again and
again. So one turn accepts a limited number of connections, and a limited number stays open until its client has read
the response.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from headwater.core.errors import WorkerUnavailable

log = logging.getLogger("headwater.cluster")

LINGER_S: Final = 1.0
"""How long a refused connection stays open, so that its client can read the response."""
REFUSED_MAX: Final = 256
"""How many refused connections stay open; beyond it the oldest is closed."""
ACCEPTED_MAX: Final = 64
"""How many connections one turn accepts."""


class Refusals:
    def __init__(self, listening: Sequence[socket.socket], selector: selectors.BaseSelector) -> None:
        self._listening = listening
        self._selector = selector
        self._is_refusing = False
        self._refused: list[tuple[float, socket.socket]] = []

    def turn(self, now_s: float, *, should_refuse: bool) -> None:
        """Begin or stop to refuse, and close the connections whose time has passed."""
        if should_refuse != self._is_refusing:
            self._is_refusing = should_refuse
            for listening in self._listening:
                if should_refuse:
                    self._selector.register(listening, selectors.EVENT_READ, partial(self._on_client, listening))
                else:
                    self._selector.unregister(listening)
        while self._refused and self._refused[0][0] <= now_s:
            self._refused.pop(0)[1].close()

    def _on_client(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_MAX):
            try:
                client, _address = listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                log.warning("a connection cannot be accepted at the moment: %s", error)
                return
            client.setblocking(False)
            self._refused.append((time.monotonic() + LINGER_S, client))
            with suppress(OSError):
                client.send(_UNAVAILABLE)
                client.shutdown(socket.SHUT_WR)
            if len(self._refused) > REFUSED_MAX:
                self._refused.pop(0)[1].close()


def _refusal() -> bytes:
    body = msgspec.json.encode(
        {
            "type": "about:blank",
            "title": "Service Unavailable",
            "status": WorkerUnavailable.status,
            "code": WorkerUnavailable.code,
            "detail": "This node has no shards at the moment. Try again.",
        }
    )
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nRetry-After: 1\r\n"
        b"Cache-Control: no-store\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


_UNAVAILABLE: Final = _refusal()
