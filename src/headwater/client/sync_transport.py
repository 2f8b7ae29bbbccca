"""HTTP/1.1 over blocking sockets, with connection reuse. Thread-safe.

A connection serves one request at a time. Invariant: a connection that failed, or whose response was not read to its
end, is closed and never reused.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

from headwater.client.effects import HttpRequest
from headwater.client.errors import ConnectError, ConnectionLostError, RequestTimeoutError
from headwater.client.http1 import HttpResponse, Origin, ResponseParser, encode_chunks, encode_head, split_url

IDLE_MAX_S: Final = 30.0
IDLE_CONNECTIONS_MAX: Final = 64
_RECEIVE_BYTES: Final = 256 * 1024
_JOIN_MAX_BYTES: Final = 64 * 1024


class SyncConnection:
    """One connection to a server."""

    __slots__ = ("_parser", "_socket", "idle_max_s", "idle_since", "origin")

    def __init__(self, origin: Origin, connected: socket.socket) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self.idle_max_s = IDLE_MAX_S
        self._socket = connected
        self._parser = ResponseParser()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: HttpRequest, headers: Mapping[str, str], timeout_s: float) -> None:
        """Send a whole request. Several may be sent before their responses are received."""
        body = request.body
        if self._socket.gettimeout() != timeout_s:
            self._socket.settimeout(timeout_s)
        length = len(body) if isinstance(body, bytes) else None
        head = encode_head(request.method, self.origin, request.target, headers, length)
        if request.method == "HEAD":
            self._parser.expect_head()
        try:
            if not isinstance(body, bytes):
                self._socket.sendall(head)
                for chunk in encode_chunks(body):
                    self._socket.sendall(chunk)
            elif len(body) <= _JOIN_MAX_BYTES:
                self._socket.sendall(head + body)
            else:
                self._socket.sendall(head)
                self._socket.sendall(body)
        except (BrokenPipeError, ConnectionResetError):
            return  # A server that rejects a body closes early; its response may have arrived.
        except TimeoutError:
            raise self._silent(timeout_s) from None
        except OSError as error:
            raise ConnectionLostError(f"{self.origin}: {error}") from None

    def response(self, *, whole: bool = True) -> HttpResponse:
        """The next response: complete, or with `whole=False` as soon as its head has arrived."""
        responses = self._parser.responses
        while not responses or (whole and not responses[0].complete):
            self._receive()
        return responses.popleft()

    def more(self, response: HttpResponse) -> bytes:
        """The next piece of a response that was returned when its head arrived; empty at the end."""
        while not response.chunks and not response.complete:
            self._receive()
        return response.take()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except TimeoutError:
            raise self._silent(self._socket.gettimeout()) from None
        except OSError as error:
            raise ConnectionLostError(f"{self.origin}: {error}") from None
        if data:
            self._parser.feed(data)
        elif not self._parser.feed_end():
            raise ConnectionLostError(f"{self.origin}: the connection ended before the response was complete")

    def _silent(self, timeout_s: float | None) -> RequestTimeoutError:
        return RequestTimeoutError(f"{self.origin} did not answer within {timeout_s:g} s")

    def is_usable(self, now: float) -> bool:
        """Whether an idle connection may be used again. Unexpected bytes mean that it was closed."""
        if now - self.idle_since > self.idle_max_s:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self._socket.close()


class SyncTransport:
    """Connections to any number of servers."""

    def __init__(self, tls: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Origin, deque[SyncConnection]] = {}
        self._process = os.getpid()

    def send(self, request: HttpRequest, headers: Mapping[str, str], timeout_s: float) -> HttpResponse:
        """Send a request and receive the complete response."""
        connection = self.take(split_url(request.url)[0])
        try:
            connection.send(request, headers, timeout_s)
            response = connection.response()
        except BaseException:
            connection.close()
            raise
        self.give_back(connection, response)
        return response

    def open(
        self, request: HttpRequest, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[SyncConnection, HttpResponse]:
        """Send a request and return when the head of the response has arrived."""
        connection = self.take(split_url(request.url)[0])
        try:
            connection.send(request, headers, timeout_s)
            return connection, connection.response(whole=False)
        except BaseException:
            connection.close()
            raise

    def take(self, origin: Origin) -> SyncConnection:
        """An idle connection, or a new one."""
        if self._process != os.getpid():
            # A forked process inherits the sockets of its parent, which still uses them.
            self._idle, self._process = {}, os.getpid()
        idle = self._idle.get(origin)
        now = time.monotonic()
        while idle:
            try:
                connection = idle.pop()
            except IndexError:
                break
            if connection.is_usable(now):
                return connection
            connection.close()
        return self.connect(origin)

    def connect(self, origin: Origin) -> SyncConnection:
        try:
            connected = socket.create_connection((origin.host, origin.port), self._connect_timeout_s)
        except (OSError, UnicodeError) as error:
            raise ConnectError(f"cannot connect to {origin}: {error}") from None
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.scheme == "https":
                if self._tls is None:
                    self._tls = ssl.create_default_context()
                connected = self._tls.wrap_socket(connected, server_hostname=origin.host)
        except OSError as error:
            connected.close()
            raise ConnectError(f"cannot connect to {origin}: {error}") from None
        return SyncConnection(origin, connected)

    def give_back(self, connection: SyncConnection, response: HttpResponse) -> None:
        """Keep a connection whose response was read to its end."""
        if not response.keep_alive or not response.complete:
            connection.close()
            return
        keep_alive = response.headers.get("keep-alive")
        if keep_alive is not None:
            connection.idle_max_s = idle_max_s_of(keep_alive)
        connection.idle_since = time.monotonic()
        idle = self._idle.setdefault(connection.origin, deque())
        if len(idle) >= IDLE_CONNECTIONS_MAX:
            connection.close()
        else:
            idle.append(connection)

    def __del__(self) -> None:
        # Close connections of streams that were used without an explicit close.
        self.close()

    def close(self) -> None:
        while self._idle:
            _, idle = self._idle.popitem()
            while idle:
                idle.pop().close()


def idle_max_s_of(keep_alive: str) -> float:
    """How long a connection may idle, from `Keep-Alive: timeout=5`: one second less, to close before the server."""
    for part in keep_alive.split(","):
        name, _, value = part.strip().partition("=")
        if name.lower() == "timeout" and value.isdigit():
            return min(IDLE_MAX_S, max(0.0, int(value) - 1.0))
    return IDLE_MAX_S
