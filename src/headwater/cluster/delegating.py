"""Live responses that are produced by another live response, which is created later."""

from __future__ import annotations

from headwater.http.responses import Channel, LiveResponse


class DelegatingResponse:
    """A live response that passes its events to an inner one, once that exists."""

    __slots__ = ("_channel", "_inner")

    def __init__(self) -> None:
        self._channel: Channel | None = None
        """None before the start, and after the client has disconnected."""
        self._inner: LiveResponse | None = None

    def on_writable(self) -> None:
        if self._inner is not None:
            self._inner.on_writable()

    def on_drain(self) -> None:
        if self._inner is not None:
            self._inner.on_drain()

    def on_disconnect(self) -> None:
        self._channel = None
        if self._inner is not None:
            self._inner.on_disconnect()
