"""Waiting for news of many streams at once: one open long-poll per stream, kept open between questions.

A long-poll is sent and left alone; the socket that becomes readable is the stream that has news. So an idle query
costs the server nothing but open connections, and asking again costs no request at all. Beyond `POLLS_MAX`
streams, the rest is asked for in turns. Invariant: a stream without an open poll is due to be asked about.
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

from headwater.spark.options import Connection
from headwater.spark.protocol import Client

log = logging.getLogger("headwater.spark")

POLLS_MAX: Final = 500
"""Open connections per query at most; a server takes ten thousand by default."""
SWEEP_INTERVAL_S: Final = 1.0
"""How often streams without a poll are asked about."""
_DRAIN_MAX_BYTES: Final = 1024 * 1024
_RETRY_S: Final = 0.5


class _Poll:
    """One long-poll on its own connection."""

    def __init__(self, stream: str, connection: http.client.HTTPConnection) -> None:
        self.stream = stream
        self.connection = connection
        self.waiting = False


class Watch:
    def __init__(self, client: Client, connection: Connection) -> None:
        self._client = client
        self._address = urlsplit(connection.root)
        self._timeout_s = connection.request_timeout_s
        self._tls = _tls_context(connection) if self._address.scheme == "https" else None
        self._selector = selectors.DefaultSelector()
        self._polls: dict[str, _Poll] = {}
        self._news: set[str] = set()
        self._resting: dict[str, float] = {}
        self._unwatched: set[str] = set()
        self._swept_at = time.monotonic()

    def await_news(self, offsets: Mapping[str, str]) -> None:
        """Have a poll open for each of these streams, at the offset where it ends as far as we know."""
        for stream, offset in offsets.items():
            poll = self._polls.get(stream)
            if (poll is not None and poll.waiting) or stream in self._news or stream in self._unwatched:
                continue
            if poll is None and len(self._polls) >= POLLS_MAX:
                self._unwatched.add(stream)
            elif self._resting.get(stream, 0.0) <= time.monotonic():
                self._send(stream, offset)

    def take(self, timeout_s: float) -> set[str]:
        """The streams with news, waiting for some if there are none. Each is told of once."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._collect(0.0)
            self._sweep()
            left_s = deadline - time.monotonic()
            if self._news or left_s <= 0:
                news, self._news = self._news, set()
                return news
            pause_s = SWEEP_INTERVAL_S if self._unwatched or self._resting else left_s
            self._collect(max(0.0, min(left_s, pause_s)))
            if self._resting:
                # A poll that could not be sent is for the next question to send.
                self._news.update(stream for stream, until in self._resting.items() if until <= time.monotonic())
                self._resting = {stream: until for stream, until in self._resting.items() if stream not in self._news}

    def close(self) -> None:
        for poll in list(self._polls.values()):
            self._drop(poll)
        self._selector.close()

    def _send(self, stream: str, offset: str) -> None:
        poll = self._polls.get(stream)
        if poll is None:
            poll = self._polls[stream] = _Poll(stream, self._connect())
        self._resting.pop(stream, None)
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

    def _answered(self, poll: _Poll) -> None:
        self._selector.unregister(poll.connection.sock)
        poll.waiting = False
        try:
            response = poll.connection.getresponse()
            if (response.length or 0) > _DRAIN_MAX_BYTES:
                # The news is enough; the data is for the tasks.
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
            self._news.add(poll.stream)

    def _failed(self, poll: _Poll, error: Exception | None) -> None:
        """Ask again a little later; whoever then cannot reach the server says so."""
        log.debug("long-poll on %s: %r", poll.stream, error)
        self._drop(poll)
        self._resting[poll.stream] = time.monotonic() + _RETRY_S

    def _drop(self, poll: _Poll) -> None:
        if poll.waiting:
            self._selector.unregister(poll.connection.sock)
            poll.waiting = False
        poll.connection.close()
        self._polls.pop(poll.stream, None)

    def _sweep(self) -> None:
        now = time.monotonic()
        if self._unwatched and now - self._swept_at >= SWEEP_INTERVAL_S:
            self._news |= self._unwatched
            self._unwatched = set()
            self._swept_at = now

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._address.hostname or "", self._address.port
        if self._tls is not None:
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)


def _tls_context(connection: Connection) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=connection.ca_file or None)
