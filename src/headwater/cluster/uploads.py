"""Large snapshots for a stream of another worker: forwarded as they are received, never held in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, cast

from headwater.cluster import frames
from headwater.cluster.peers import NO_ORIGIN, Peer
from headwater.engine.uploads import BlobUpload
from headwater.http.headers import CONTINUE
from headwater.http.request import Request
from headwater.http.responses import Channel

_LAST_CHUNK: Final = b"0\r\n\r\n"
_OF_BODY: Final = frozenset((b"transfer-encoding", b"content-length"))


class RelayedChannel(Protocol):
    """The connection of the client."""

    def write_chunk(self, chunk: bytes) -> None: ...

    def end_relayed(self, *, close: bool) -> None: ...

    def abort(self) -> None: ...


class RelayedUpload(BlobUpload):
    """Forwards the body of a request to the owner of its stream, and the response back.

    It is a live response as well: the response is held back until the responses before it are sent.
    """

    def __init__(self, peer: Peer, request: Request, begin: int, *, is_next: bool) -> None:
        # This worker stores nothing of the blob, so the base class is not initialized.
        self.worker: Final = peer.worker
        self._peer: Peer | None = peer
        # The owner processes the request at the end of the body, which must not be before earlier requests.
        self._is_chunked = not is_next or b"content-length" not in request.headers
        self._is_full = False
        self._is_cut = False
        self._answer: list[bytes] = []
        self._has_ended: bool | None = None
        """Whether the connection must be closed after the response; None until the response is complete."""
        self._channel: RelayedChannel | None = None
        self.on_drained = None
        self.on_continue: Callable[[], None] | None = None
        """Called when the owner is ready for the body of a client that waits for this."""
        self.on_response: Callable[[bytes], None] | None = None
        """Called with the owner's response, which may be sent before the body is complete."""
        begin = begin if is_next else begin | frames.AHEAD
        self._number = peer.begin(self, begin, NO_ORIGIN, self._head(request))

    # -- as an upload ----------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return self._is_full

    def write(self, data: bytes) -> None:
        self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def abandon(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.cancel_tunnel(self._number)

    # -- as a live response ----------------------------------------------------------------------------------------

    def start(self, channel: Channel) -> None:
        """The body is complete."""
        if self._is_chunked:
            self._send(_LAST_CHUNK)
        self._channel = cast("RelayedChannel", channel)
        self._pass_on()

    def on_writable(self) -> None:
        """Do nothing: the response is small."""

    def on_drain(self) -> None:
        """Do nothing: the owner sends the response."""

    def on_disconnect(self) -> None:
        self._channel = None
        self.abandon()

    # -- as the client of a tunnel ---------------------------------------------------------------------------------

    def on_whole(self, data: bytes) -> None:
        self.on_data(data)
        self.on_end(close=False)

    def on_data(self, data: bytes) -> None:
        if data != CONTINUE:
            self._answer.append(data)
        elif self.on_continue is not None:
            self.on_continue()

    def on_end(self, *, close: bool) -> None:
        self._peer = None
        self._has_ended = close
        self._free()
        self._pass_on()
        if self.on_response is not None:
            self.on_response(b"".join(self._answer))

    def on_cut(self) -> None:
        self._peer = None
        self._is_cut = True
        self._free()
        self._pass_on()

    def on_peer_lost(self) -> None:
        self.on_cut()

    def on_hold(self, *, is_held: bool) -> None:
        self._is_full = is_held
        if not is_held:
            self._free()

    # -- implementation --------------------------------------------------------------------------------------------

    def _head(self, request: Request) -> bytes:
        headers = request.headers
        fields = b"".join([b"%b: %b\r\n" % field for field in headers.items() if field[0] not in _OF_BODY])
        length = b"transfer-encoding: chunked" if self._is_chunked else b"content-length: " + headers[b"content-length"]
        return b"%b %b HTTP/1.1\r\n%b%b\r\n\r\n" % (request.method, request.target, fields, length)

    def _send(self, data: bytes) -> None:
        if self._peer is not None:
            for piece in frames.pieces(data):
                self._peer.send(frames.MORE, self._number, piece)

    def _free(self) -> None:
        self._is_full = False
        if self.on_drained is not None:
            self.on_drained()

    def _pass_on(self) -> None:
        channel = self._channel
        if channel is None or (self._has_ended is None and not self._is_cut):
            return
        self._channel = None
        if self._has_ended is None:
            channel.abort()
            return
        for data in self._answer:
            channel.write_chunk(data)
        channel.end_relayed(close=self._has_ended)
