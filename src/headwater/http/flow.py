"""Flow control: when a socket is read, how much memory requests use, and how long responses occupy the event loop.

A socket is not read while there is any reason: its responses are unread, its queue of pipelined requests is full, or an
upload is ahead of the disk. Request bodies, queued requests and input that waits share one budget. Long responses are
sent in turns, and all turns of one iteration of the event loop share a time limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

UNREAD: Final = 1
"""The client has not read its responses."""
QUEUE_FULL: Final = 2
"""The queue of pipelined requests is full."""
UPLOAD_AHEAD: Final = 4
"""An upload is received faster than the disk can write it."""
UNPARSED: Final = 8
"""Received data is still being parsed, a piece in each turn."""
BODY_TURN: Final = 16
"""Memory for more of a large body is being allocated, or the complete body is being processed."""

PIPELINE_MAX_REQUESTS: Final = 32
"""Requests of one connection that may be queued; beyond that nothing is parsed and the socket is not read."""
PIPELINE_MAX_BYTES: Final = 1024 * 1024
"""Memory of their heads and bodies; beyond that nothing is parsed and the socket is not read."""
REQUEST_BYTES: Final = 512
"""Memory that a queued request counts with, beside its head and its body."""
FIELD_BYTES: Final = 128
"""Memory that each of its header fields counts with, beside its bytes."""
PARSE_BYTES: Final = 32 * 1024
"""Bytes that are parsed at a time: they may contain thousands of chunks or header fields."""
TURN_REQUESTS: Final = 64
"""Requests of one connection that are processed in one turn."""
TURN_BYTES: Final = 256 * 1024
"""Bytes that are written to one connection in one turn."""
POSTPONED_BYTES: Final = 4096
"""Received bytes of one connection that wait for its turn, beyond which the socket is not read."""
QUICK_S: Final = 0.001
"""A client whose turns each take less time than this gets its turns before others do."""
QUICK_TURNS: Final = 16
"""How many turns in a row must be so quick."""
TURNS_S: Final = 0.008
"""Time for the turns of all connections before the event loop polls its sockets, and for what is then received."""


class FlowControl:
    """Decides when the socket of one connection is read. `reasons` has a bit for each reason not to read it."""

    __slots__ = ("_transport", "reasons")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.reasons = 0

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport

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
    """The budget for the requests of all connections in memory: large bodies, and whatever waits."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, size: int) -> bool:
        """Reserve bytes; False if they exceed the limit, in which case nothing is reserved."""
        if self.held + size > self.limit:
            return False
        self.held += size
        return True

    def release(self, size: int) -> None:
        self.held -= size
        assert self.held >= 0, "more was released than reserved"


class Turns:
    """The time of one iteration of the event loop for requests, and the queue of connections that need a later one.

    Connections share the time: it ends at `ends_at_s`, for work that a received request begins as well as for turns.
    """

    __slots__ = ("_call_soon", "_is_due", "_is_open", "_quick", "_waiting", "ends_at_s")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._waiting: deque[Callable[[], None]] = deque()
        self._quick: deque[Callable[[], None]] = deque()
        """The turns of clients whose requests take little time: they are first."""
        self._is_due = False
        self._is_open = False
        """Whether `ends_at_s` was set in this iteration of the event loop."""
        self.ends_at_s = 0.0
        """The time of `perf_counter` after which `begin` must be asked before a request is processed."""

    def begin(self, now_s: float) -> bool:
        """Begin to process requests after `ends_at_s`. False if the time of this iteration is used up."""
        if self._is_open:
            return False
        self._is_open = True
        self.ends_at_s = now_s + TURNS_S
        self._ask_for_next()
        return True

    def schedule(self, turn: Callable[[], None], *, is_quick: bool = False) -> None:
        """Call `turn` in a later iteration of the event loop."""
        (self._quick if is_quick else self._waiting).append(turn)
        self._ask_for_next()

    def _ask_for_next(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._run)

    def _run(self) -> None:
        """Give turns in the next iteration, before its sockets are polled; what these receive has its own time."""
        self._is_due = self._is_open = False
        quick, waiting = self._quick, self._waiting
        if not quick and not waiting:
            return
        self._is_open = True
        self.ends_at_s = time.perf_counter() + TURNS_S
        self._give(quick)
        if waiting:
            # At least one, even if the others have used up the time.
            self.ends_at_s = max(self.ends_at_s, time.perf_counter() + QUICK_S)
            self._give(waiting)
        self._is_open = False
        self.ends_at_s = 0.0
        if quick or waiting:
            self._ask_for_next()

    def _give(self, turns: deque[Callable[[], None]]) -> None:
        """Give the turns that wait now, until the time is over."""
        for _ in range(len(turns)):
            turns.popleft()()
            if time.perf_counter() >= self.ends_at_s:
                break
