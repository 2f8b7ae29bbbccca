"""Large snapshots for a stream of another worker: forwarded as they are received, never held in memory as a whole."""

from __future__ import annotations

from typing import Final

from headwater.cluster import frames
from headwater.cluster.peers import NO_ORIGIN, Peer
from headwater.cluster.relay import RelayingConnection, head_bytes
from headwater.engine.uploads import BlobUpload
from headwater.http.request import Request
from headwater.http.responses import Channel

_LAST_CHUNK: Final = b"0\r\n\r\n"


class RelayedUpload(BlobUpload):
    """Forwards the body of a request to the owner of its stream, and the response back.

    It is a live response as well: the response is held back until the responses before it are sent.
    """

    def __init__(self, peer: Peer, request: Request, begin: int) -> None:
        # This worker stores nothing of the blob, so the base class is not initialized.
        self._peer: Peer | None = peer
        self._is_chunked = b"content-length" not in request.headers
        self._is_full = False
        self._is_cut = False
        self._answer: list[bytes] = []
        self._has_ended: bool | None = None
        """Whether the connection must be closed after the response; None until the response is complete."""
        self._channel: Channel | None = None
        self.on_drained = None
        self._number = peer.begin(self, begin, NO_ORIGIN, head_bytes(request, chunked=self._is_chunked))

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
        self._channel = channel
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
        self._answer.append(data)

    def on_end(self, *, close: bool) -> None:
        # An owner that responded before the body was complete has closed the tunnel.
        self._peer = None
        self._has_ended = close
        self._free()
        self._pass_on()

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
        assert isinstance(channel, RelayingConnection)
        if self._has_ended is None:
            channel.abort()
            return
        for data in self._answer:
            channel.write_chunk(data)
        channel.end_relayed(close=self._has_ended)
