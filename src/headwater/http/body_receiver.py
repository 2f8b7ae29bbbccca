"""Receive the rest of a large body directly into its final buffer, bypassing the HTTP parser.

While it is the protocol of a socket, exactly the remaining bytes of the body are read, so no bytes of the next request
are among them. The kernel's copy into the buffer is the only one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from headwater.http.connection_input import ConnectionInput
from headwater.http.flow import BODY_TURN
from headwater.http.states import BODY

_DISCARDED_BYTES: Final = 64 * 1024


class BodyReceiver(asyncio.BufferedProtocol):
    """The protocol of a socket while a large body is received."""

    __slots__ = ("_call_soon", "_connection", "_flow", "_now_s", "_on_end", "_parser", "_transport")

    def __init__(
        self,
        connection: asyncio.Protocol,
        transport: asyncio.Transport,
        received: ConnectionInput,
        now_s: Callable[[], float],
        on_end: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._parser = received.parser
        self._flow = received
        self._now_s = now_s
        self._on_end = on_end
        self._call_soon = asyncio.get_running_loop().call_soon
        self._switch(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self._parser.bulk_buffer()
        return buffer if buffer is not None else memoryview(bytearray(_DISCARDED_BYTES))

    def buffer_updated(self, nbytes: int) -> None:
        self._parser.receive_bulk(nbytes, self._now_s())
        if not self._parser.bulk_buffer():
            # Later: the event loop still references the buffer, so it cannot be taken without a copy now.
            self._flow.hold(BODY_TURN)
            self._call_soon(self._continue)

    def _continue(self) -> None:
        parser = self._parser
        if parser.state is BODY and parser.continue_bulk():
            self._flow.release(BODY_TURN)
            return
        self._switch(self._connection)
        self._on_end()

    def _switch(self, protocol: asyncio.BaseProtocol) -> None:
        """Change the protocol. Reading is paused and resumed, because that is when an event loop checks its kind."""
        self._flow.hold(BODY_TURN)
        self._transport.set_protocol(protocol)
        self._flow.release(BODY_TURN)

    def eof_received(self) -> bool:
        return bool(self._connection.eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
