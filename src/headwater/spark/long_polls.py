"""Wait for changes of many streams: one open long-poll per stream, kept open between Spark's calls.

When the socket of a long-poll becomes readable, its stream has changed. An idle query costs the server only open
connections, and no requests. Streams beyond `POLLS_MAX` are checked once a second. Invariant: every stream has an open
long-poll or will be checked.
"""

from __future__ import annotations

import http.client
import logging
import selectors
import ssl
import time
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from headwater.spark.options import ConnectionOptions
from headwater.spark.protocol import StreamsClient

log = logging.getLogger("headwater.spark")

POLLS_MAX: Final = 500
"""The most open connections of a query; a server allows ten thousand by default."""
SWEEP_INTERVAL_S: Final = 1.0
"""How often streams without a long-poll are checked."""
_DRAIN_MAX_BYTES: Final = 1024 * 1024
_RETRY_S: Final = 0.5


class _LongPoll:
    """One long-poll on its own connection."""

    def __init__(self, stream: str, connection: http.client.HTTPConnection) -> None:
        self.stream = stream
        self.connection = connection
        self.waiting = False


class LongPolls:
    def __init__(self, client: StreamsClient, connection: ConnectionOptions) -> None:
        self._client = client
        self._address = urlsplit(connection.root)
        self._timeout_s = connection.request_timeout_s
        self._tls = _tls_context(connection) if self._address.scheme == "https" else None
        self._selector = selectors.DefaultSelector()
        self._polls: dict[str, _LongPoll] = {}
        self._changed: set[str] = set()
        self._failed_until: dict[str, float] = {}
        self._unwatched: set[str] = set()
        self._swept_at = time.monotonic()

    def open_polls(self, offsets: Mapping[str, str]) -> None:
        """Open a long-poll for each of these streams, at the last known tail."""
        for stream, offset in offsets.items():
            poll = self._polls.get(stream)
            if (poll is not None and poll.waiting) or stream in self._changed or stream in self._unwatched:
                continue
            if poll is None and len(self._polls) >= POLLS_MAX:
                self._unwatched.add(stream)
            elif self._failed_until.get(stream, 0.0) <= time.monotonic():
                self._send(stream, offset)

    def take(self, timeout_s: float) -> set[str]:
        """The streams that have changed; wait for a change if there are none. Each change is reported once."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._collect(0.0)
            self._sweep()
            left_s = deadline - time.monotonic()
            if self._changed or left_s <= 0:
                changed, self._changed = self._changed, set()
                return changed
            pause_s = SWEEP_INTERVAL_S if self._unwatched or self._failed_until else left_s
            self._collect(max(0.0, min(left_s, pause_s)))
            if self._failed_until:
                # The next call sends polls that could not be sent.
                now = time.monotonic()
                self._changed.update(stream for stream, until in self._failed_until.items() if until <= now)
                for stream in self._changed & self._failed_until.keys():
                    del self._failed_until[stream]

    def close(self) -> None:
        for poll in list(self._polls.values()):
            self._drop(poll)
        self._selector.close()

    def _send(self, stream: str, offset: str) -> None:
        poll = self._polls.get(stream)
        if poll is None:
            poll = self._polls[stream] = _LongPoll(stream, self._connect())
        self._failed_until.pop(stream, None)
        url = urlsplit(self._client.url(stream, {"offset": offset, "live": "long-poll"}))
        try:
            poll.connection.request("GET", f"{url.path}?{url.query}", headers=self._client.credentials())
        except OSError as error:
            self._failed(poll, error)
            return
        poll.waiting = True
        self._selector.register(poll.connection.sock, selectors.EVENT_READ, poll)

    def _collect(self, timeout_s: float) -> None:
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            self._answered(key.data)

    def _answered(self, poll: _LongPoll) -> None:
        self._selector.unregister(poll.connection.sock)
        poll.waiting = False
        try:
            response = poll.connection.getresponse()
            if (response.length or 0) > _DRAIN_MAX_BYTES:
                # Tasks read the data.
                poll.connection.close()
            else:
                response.read()
        except (OSError, http.client.HTTPException) as error:
            self._failed(poll, error)
            return
        offset = response.headers.get("Stream-Next-Offset")
        if response.status == 204 and offset is not None and response.headers.get("Stream-Closed") != "true":
            self._send(poll.stream, offset)
        elif response.status >= 500 or response.status == 429:
            self._failed(poll, None)
        else:
            self._changed.add(poll.stream)

    def _failed(self, poll: _LongPoll, error: Exception | None) -> None:
        """Try again later; a request that cannot reach the server then raises the error."""
        log.debug("long-poll on %s: %r", poll.stream, error)
        self._drop(poll)
        self._failed_until[poll.stream] = time.monotonic() + _RETRY_S

    def _drop(self, poll: _LongPoll) -> None:
        if poll.waiting:
            self._selector.unregister(poll.connection.sock)
            poll.waiting = False
        poll.connection.close()
        self._polls.pop(poll.stream, None)

    def _sweep(self) -> None:
        now = time.monotonic()
        if self._unwatched and now - self._swept_at >= SWEEP_INTERVAL_S:
            self._changed |= self._unwatched
            self._unwatched = set()
            self._swept_at = now

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._address.hostname or "", self._address.port
        if self._tls is not None:
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)


def _tls_context(connection: ConnectionOptions) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=connection.ca_file or None)
