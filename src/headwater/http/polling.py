"""The wait of a long-poll: its answer channel, its deadline, and the count of live readers.

Invariant: a request is answered once. The code that answers takes the channel from `_leave`, which is None afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from headwater.http.context import Context
from headwater.http.deadlines import Deadline
from headwater.http.responses import Channel


class WaitingPoll(ABC):
    """One waiting request. Subclasses define what it waits for, and the answer after the timeout."""

    __slots__ = ("_channel", "_context", "_deadline")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._channel: Channel | None = None
        """The channel for the answer; None before the start and after the answer."""
        self._deadline: Deadline | None = None

    @abstractmethod
    def on_drain(self) -> None:
        """Answer without data: the deadline has passed, or the server stops."""

    def on_writable(self) -> None:  # noqa: B027 - nothing was written yet, so nothing waits to be written
        """The channel takes more."""

    def on_disconnect(self) -> None:
        self._leave()

    def _wait(self, channel: Channel) -> None:
        """Begin to wait."""
        self._channel = channel
        self._deadline = self._context.long_poll_deadlines.set(self.on_drain)
        self._context.metrics.followers["long-poll"] += 1

    def _leave(self) -> Channel | None:
        """Stop waiting. Returns the channel to answer on, if the request is not answered yet."""
        channel, self._channel = self._channel, None
        if channel is not None:
            assert self._deadline is not None
            self._deadline.cancel()
            self._context.metrics.followers["long-poll"] -= 1
            self._forget()
        return channel

    @abstractmethod
    def _forget(self) -> None:
        """Remove this request from those that are woken."""
