"""The waiting part of a long-poll: its channel, its deadline, and the count of live readers.

Invariant: a request gets one response. The code that responds gets the channel from `_leave`, which is None afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from headwater.http.context import Context
from headwater.http.deadlines import Deadline
from headwater.http.responses import Channel


class WaitingPoll(ABC):
    """One waiting request. Subclasses define what it waits for, and the response after the timeout."""

    __slots__ = ("_channel", "_context", "_deadline")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._channel: Channel | None = None
        """The channel for the response; None before the start and after the response."""
        self._deadline: Deadline | None = None

    @abstractmethod
    def on_drain(self) -> None:
        """Respond without data, because the deadline has passed or the server stops."""

    def on_writable(self) -> None:  # noqa: B027 - nothing is written before the response
        """Called when the channel accepts more data."""

    def on_disconnect(self) -> None:
        self._leave()

    def _wait(self, channel: Channel) -> None:
        """Start waiting."""
        self._channel = channel
        self._deadline = self._context.long_poll_deadlines.set(self.on_drain)
        self._context.metrics.followers["long-poll"] += 1

    def _leave(self) -> Channel | None:
        """Stop waiting. Returns the channel for the response, or None if there was one already."""
        channel, self._channel = self._channel, None
        if channel is not None:
            assert self._deadline is not None
            self._deadline.cancel()
            self._context.metrics.followers["long-poll"] -= 1
            self._forget()
        return channel

    @abstractmethod
    def _forget(self) -> None:
        """Unregister this request, so that it is not woken any more."""
