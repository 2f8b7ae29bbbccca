"""Flow control: when a socket is read, how much memory requests take, and how long answers hold the event loop.

Reading from a socket stops while there is any reason to: its answers are unread, its queue of pipelined requests is
full, or an upload is ahead of the disk. The bytes of all request bodies that are held at once come out of one budget.
Answers that take long are sent in turns, and all turns of one iteration of the event loop share a time limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

UNREAD: Final = 1
"""The client has not read the answers that were sent to it."""
QUEUE_FULL: Final = 2
"""Enough pipelined requests wait for their turn."""
UPLOAD_AHEAD: Final = 4
"""An upload is received faster than the disk can write it."""
UNPARSED: Final = 8
"""What was received is still being parsed, a piece in each turn."""
BODY_TURN: Final = 16
"""The memory for more of a large body is prepared, or the complete body is taken."""

PIPELINE_MAX_REQUESTS: Final = 32
PIPELINE_MAX_BYTES: Final = 1024 * 1024
"""Requests, and bytes of their bodies, that may wait while one is answered; beyond that the socket is not read."""
PARSE_BYTES: Final = 32 * 1024
"""What is parsed in one turn: it may be thousands of chunks, header fields or requests."""
TURN_REQUESTS: Final = 64
TURN_BYTES: Final = 256 * 1024
"""What one connection may do in one turn: requests answered, bytes written."""
TURNS_S: Final = 0.008
"""Time for the turns of all connections before the event loop polls its sockets again."""


class FlowControl:
    """Decides when the socket of one connection is read. `reasons` is a set of bits: why it is not."""

    __slots__ = ("_transport", "reasons")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.reasons = 0

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    @property
    def unread(self) -> bool:
        """Whether the client has not read what was sent to it."""
        return bool(self.reasons & UNREAD)

    def hold(self, reason: int) -> None:
        """Do not read from the socket until the reason is released."""
        if not self.reasons and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self.reasons |= reason

    def release(self, reason: int) -> None:
        if not self.reasons & reason:
            return
        self.reasons &= ~reason
        if not self.reasons and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


class ByteBudget:
    """The bytes of request bodies that all connections hold together."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, size: int) -> bool:
        """Reserve bytes; False if they do not fit, and then nothing is reserved."""
        if self.held + size > self.limit:
            return False
        self.held += size
        return True

    def give_back(self, size: int) -> None:
        self.held -= size
        assert self.held >= 0, "more was released than reserved"


class Turns:
    """The connections that have more to send, one turn each, in the order of their requests."""

    __slots__ = ("_call_soon", "_is_due", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def ask(self, turn: Callable[[], None]) -> None:
        """Call `turn` in a later iteration of the event loop."""
        self._waiting.append(turn)
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._run)

    def _run(self) -> None:
        ends_at = time.perf_counter() + TURNS_S
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()
            if time.perf_counter() >= ends_at:
                break
        self._is_due = bool(self._waiting)
        if self._is_due:
            self._call_soon(self._run)
