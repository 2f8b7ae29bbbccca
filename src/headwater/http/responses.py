"""Results of handlers: a complete response, one in pieces, a live one, or one that is deferred until it is durable.

The connection renders all of them, and counts and logs each once. A handler has no access to the connection; a live
response gets a `Channel`, a narrow interface to the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from headwater.core.errors import Refusal
from headwater.core.producers import ProducerHeaders
from headwater.core.subscription_errors import SubscriptionRefusal
from headwater.http.headers import NO_STORE, REASONS, header

Buffer: TypeAlias = bytes | memoryview

_PROBLEM: Final = b"Content-Type: application/problem+json\r\n"
_JSON: Final = b"Content-Type: application/json\r\n"

_encode_json: Final = msgspec.json.Encoder().encode


class Response(msgspec.Struct, frozen=True, gc=False):
    """A complete response. `headers` are complete lines; length, date, security and CORS headers are added."""

    status: int
    headers: bytes = b""
    body: bytes = b""


class PiecewiseResponse(msgspec.Struct, frozen=True):
    """A response of known length whose body is sent from `pieces` as the client reads it."""

    status: int
    headers: bytes
    length: int
    pieces: Iterator[Buffer]


class Repeat(msgspec.Struct, frozen=True):
    """How to process another request that differs only in its body."""

    begin: Callable[[bytes, Callable[[Any], None]], bytes | None]
    """Returns the rest of the headers of a 204 if the response is complete, or None if the callback gets the result."""
    beginning: bytes
    """The headers before that rest."""
    render: Callable[[Any], bytes | Response]
    """The response for the result; bytes are the headers of a 204."""
    target: tuple[str, str | None] | None = None
    """The stream and the content type of an append that has only a body, for its compiled path."""


RepeatFor: TypeAlias = Callable[[str, ProducerHeaders | None], Repeat | None]
"""How to process an append to the stream with this name by this producer; None if there is no stream with exactly this
name."""


class Deferred(msgspec.Struct, frozen=True):
    """A response that needs a result of the engine: `begin` gets a callback for the result or a `Refusal`."""

    begin: Callable[[Callable[[Any], None]], None]
    render: Callable[[Any], Response | PiecewiseResponse]
    operation: str | None = None
    """The operation in metrics, instead of the route's."""
    repeat: Repeat | None = None
    """Set if requests with the same head differ only in their body."""
    repeat_for: RepeatFor | None = None
    """Set if appends to other streams, and with other values of a producer, can have the same headers."""


class Channel(Protocol):
    """The interface of a connection for a live response."""

    @property
    def writable(self) -> bool:
        """Whether more can be written now: the client reads, and the limit of this turn is not reached."""

    def begin_body(self, headers: bytes) -> None:
        """Begin a 200 response of unknown length."""

    def write(self, data: bytes) -> None:
        """Write a piece of the body. `writable` says whether another one should follow in this turn."""

    def write_chunk(self, chunk: bytes) -> None:
        """Write a piece that is already encoded as a chunk, for a client that gets a chunked body (HTTP/1.1)."""

    def offer_chunk(self, chunk: bytes) -> bool:
        """Write such a piece if the channel is writable. One call for both, because each reader of each event needs
        it."""

    def yield_turn(self) -> None:
        """Write no more in this turn; `on_writable` is called in a later one."""

    def end_body(self) -> None:
        """Complete the body."""

    def respond(self, response: Response | PiecewiseResponse) -> None:
        """Send a complete response instead of a live body."""

    def refuse(self, refusal: Refusal) -> None:
        """Send an error instead of a live body."""


class LiveResponse(Protocol):
    """A response that waits or continues. The connection calls its methods on events."""

    def start(self, channel: Channel) -> None: ...

    def on_writable(self) -> None:
        """Called when the channel accepts more data."""

    def on_drain(self) -> None:
        """End cleanly, because the server is stopping."""

    def on_disconnect(self) -> None:
        """Called when the client has disconnected. The channel must not be used any more."""


AnyResponse: TypeAlias = Response | PiecewiseResponse | Deferred | LiveResponse


def problem(refusal: Refusal) -> Response:
    """The response to a refused request: RFC 9457, or the form of the subscription API."""
    headers = b"".join(header(name, value) for name, value in refusal.headers)
    if isinstance(refusal, SubscriptionRefusal):
        body = _encode_json({"error": {"code": refusal.code, "message": refusal.detail, **refusal.members}})
        return Response(refusal.status, NO_STORE + _JSON + headers, body)
    body = _encode_json(
        {
            "type": "about:blank",
            "title": REASONS[refusal.status],
            "status": refusal.status,
            "code": refusal.code,
            "detail": refusal.detail,
        }
    )
    return Response(refusal.status, NO_STORE + _PROBLEM + headers, body)
