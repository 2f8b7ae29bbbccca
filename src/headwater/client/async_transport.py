"""HTTP/1.1 over asyncio, with connection reuse, for one event loop at a time.

A connection may have several requests in flight; responses arrive in order. Invariant: a connection that failed, or
whose response was not read to its end, is closed and never reused.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from typing import Final, cast

from headwater.client.effects import HttpRequest
from headwater.client.errors import ClientError, ConnectError, ConnectionLostError, RequestTimeoutError
from headwater.client.http1 import HttpResponse, Origin, ResponseParser, encode_chunks, encode_head, split_url
from headwater.client.sync_transport import IDLE_CONNECTIONS_MAX, IDLE_MAX_S, idle_max_s_of

_BUFFERED_MAX_BYTES: Final = 1024 * 1024
"""Buffer limit of a response that is read in pieces: beyond it, the socket is not read until pieces are consumed."""


class _Pending:
    """A request that waits for its response."""

    __slots__ = ("future", "whole")

    def __init__(self, future: asyncio.Future[HttpResponse], *, whole: bool) -> None:
        self.future = future
        self.whole = whole


class AsyncConnection(asyncio.Protocol):
    """One connection to a server."""

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self.idle_max_s = IDLE_MAX_S
        self.error: ClientError | None = None
        """Why the connection ended; None while it is open."""
        self._loop = loop
        self._parser = ResponseParser()
        self._pending: deque[_Pending] = deque()
        self._streamed: HttpResponse | None = None
        self._more: asyncio.Future[None] | None = None
        self._buffered = 0
        self._transport: asyncio.Transport | None = None
        self._drained: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_s = 0.0
        self._active_at = 0.0

    # -- requests ----------------------------------------------------------------------------------------------------

    def send(
        self, request: HttpRequest, headers: Mapping[str, str], timeout_s: float, *, whole: bool = True
    ) -> asyncio.Future[HttpResponse]:
        """Write a request; return a future for its response. The body must be bytes."""
        body = request.body
        assert isinstance(body, bytes)
        assert self._transport is not None
        head = encode_head(request.method, self.origin, request.target, headers, len(body))
        future = self._expect(request, timeout_s, whole=whole)
        self._transport.write(head + body)
        return future

    async def send_pieces(
        self, request: HttpRequest, headers: Mapping[str, str], timeout_s: float
    ) -> asyncio.Future[HttpResponse]:
        """Write a request whose body is an iterable, at the speed of the network."""
        body = request.body
        assert not isinstance(body, bytes)
        assert self._transport is not None
        head = encode_head(request.method, self.origin, request.target, headers, None)
        future = self._expect(request, timeout_s, whole=True)
        self._transport.write(head)
        for piece in encode_chunks(body):
            if self._drained is not None:
                await self._drained
            if self.error is not None or future.done():
                break
            self._transport.write(piece)
        return future

    def _expect(self, request: HttpRequest, timeout_s: float, *, whole: bool) -> asyncio.Future[HttpResponse]:
        if self.error is not None:
            raise self.error
        if request.method == "HEAD":
            self._parser.expect_head()
        future: asyncio.Future[HttpResponse] = self._loop.create_future()
        self._pending.append(_Pending(future, whole=whole))
        self._watch(timeout_s)
        return future

    async def more(self, response: HttpResponse) -> bytes:
        """The next piece of a response that was returned when its head arrived; empty at the end."""
        while not response.chunks and not response.complete:
            if self.error is not None:
                raise self.error
            self._watch(self._timeout_s)
            self._more = self._loop.create_future()
            try:
                await self._more
            finally:
                self._more = None
        if self._buffered > _BUFFERED_MAX_BYTES and self._transport is not None and self.error is None:
            self._transport.resume_reading()
        self._buffered = 0
        return response.take()

    def close(self) -> None:
        self._fail(ConnectionLostError(f"{self.origin}: the connection was closed"))
        if self._transport is not None:
            self._transport.abort()

    # -- the timeout: how long to wait for data while a response is pending ------------------------------------------

    def _watch(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._active_at = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(timeout_s, self._check_silence)

    def _check_silence(self) -> None:
        self._timer = None
        if not self._pending and self._more is None:
            return
        left_s = self._active_at + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_silence)
            return
        self._fail(RequestTimeoutError(f"{self.origin} did not answer within {self._timeout_s:g} s"))
        if self._transport is not None:
            self._transport.abort()

    # -- called by the event loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Transports of uvloop have the methods of `asyncio.Transport` but are not instances of it.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._active_at = self._loop.time()
        try:
            self._parser.feed(data)
        except ClientError as error:
            self._fail(error)
            if self._transport is not None:
                self._transport.abort()
            return
        self._deliver(len(data))

    def _deliver(self, received: int) -> None:
        responses, pending = self._parser.responses, self._pending
        if self._streamed is not None:
            self._buffered += received
            if self._buffered > _BUFFERED_MAX_BYTES and not self._streamed.complete and self._transport is not None:
                self._transport.pause_reading()
            if self._more is not None and not self._more.done():
                self._more.set_result(None)
            if self._streamed.complete:
                self._streamed = None
        while pending and responses:
            response = responses[0]
            if not response.complete:
                if pending[0].whole:
                    return
                self._streamed = response
            responses.popleft()
            future = pending.popleft().future
            if not future.done():
                future.set_result(response)

    def eof_received(self) -> bool:
        if self._parser.feed_end():
            self._deliver(0)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        reason = str(error) if error is not None else "the connection ended before the response was complete"
        self._fail(ConnectionLostError(f"{self.origin}: {reason}"))

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def _fail(self, error: ClientError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.resume_writing()
        while self._pending:
            future = self._pending.popleft().future
            if not future.done():
                future.set_exception(error)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


class AsyncTransport:
    """Connections to any number of servers."""

    def __init__(self, tls: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Origin, deque[AsyncConnection]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def send(self, request: HttpRequest, headers: Mapping[str, str], timeout_s: float) -> HttpResponse:
        """Send a request and receive the complete response."""
        connection = await self.take(split_url(request.url)[0])
        try:
            if isinstance(request.body, bytes):
                future = connection.send(request, headers, timeout_s)
            else:
                future = await connection.send_pieces(request, headers, timeout_s)
            response = await future
        except BaseException:
            connection.close()
            raise
        self.give_back(connection, response)
        return response

    async def open(
        self, request: HttpRequest, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[AsyncConnection, HttpResponse]:
        """Send a request and return when the head of the response has arrived."""
        connection = await self.take(split_url(request.url)[0])
        try:
            return connection, await connection.send(request, headers, timeout_s, whole=False)
        except BaseException:
            connection.close()
            raise

    async def take(self, origin: Origin) -> AsyncConnection:
        """An idle connection, or a new one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # Connections belong to the loop that created them.
            self._idle, self._loop = {}, loop
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.error is None and loop.time() - connection.idle_since <= connection.idle_max_s:
                return connection
            connection.close()
        return await self.connect(origin)

    async def connect(self, origin: Origin) -> AsyncConnection:
        loop = asyncio.get_running_loop()
        tls: ssl.SSLContext | None = None
        if origin.scheme == "https":
            if self._tls is None:
                self._tls = ssl.create_default_context()
            tls = self._tls
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: AsyncConnection(origin, loop), origin.host, origin.port, ssl=tls
                )
        except (OSError, UnicodeError) as error:
            reason = str(error) or f"no answer within {self._connect_timeout_s:g} s"
            raise ConnectError(f"cannot connect to {origin}: {reason}") from None
        return connection

    def give_back(self, connection: AsyncConnection, response: HttpResponse) -> None:
        """Keep a connection whose response was read to its end."""
        if not response.keep_alive or not response.complete or connection.error is not None:
            connection.close()
            return
        keep_alive = response.headers.get("keep-alive")
        if keep_alive is not None:
            connection.idle_max_s = idle_max_s_of(keep_alive)
        assert self._loop is not None
        connection.idle_since = self._loop.time()
        idle = self._idle.setdefault(connection.origin, deque())
        if len(idle) >= IDLE_CONNECTIONS_MAX:
            connection.close()
        else:
            idle.append(connection)

    def close(self) -> None:
        while self._idle:
            _, idle = self._idle.popitem()
            while idle:
                idle.pop().close()
