"""Send the tails of streams to other workers that have readers of them, once per worker.

A worker asks to follow a stream, and gets its last messages and then everything that becomes durable, in order. This is
the owner's side; `followed_streams` is the other. If a worker does not keep up, or a message is too large to be sent to
all workers, there is a gap, and the next update says where it continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from headwater.cluster import frames
from headwater.cluster.feed import FedStream, described
from headwater.cluster.peers import Peer, Peers
from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.engine.engine import Engine
from headwater.engine.stream import LiveStream

WINDOW_BYTES: Final = 64 * 1024
"""How much of the last data is sent when a worker starts to follow."""
UPDATE_MAX_BYTES: Final = 1024 * 1024
"""The most data in one update. A worker that needs more gets a gap instead, and its readers are relayed."""
CONGESTED_S: Final = 0.02
"""The pause before more is sent to a worker that did not keep up."""


class TailUpdate(msgspec.Struct, frozen=True, array_like=True, tag="update"):
    """Messages of a stream from (`message_index`, `byte_position`) to its tail, and the rest of what readers see."""

    stream: FedStream
    is_first: bool
    message_index: int
    byte_position: int
    lengths: Sequence[int]
    data: bytes


class TailGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """The stream has ended."""

    stream_id: int


encode: Final = msgspec.msgpack.Encoder().encode


class Tails:
    """The streams of this worker that others follow."""

    def __init__(self, engine: Engine, peers: Peers, loop: asyncio.AbstractEventLoop) -> None:
        self.engine: Final = engine
        self.loop: Final = loop
        self._sent: dict[tuple[int, int], SentTail] = {}
        """By worker and incarnation."""
        self._peers = peers
        peers.answers("follow-tail", self._follow)
        peers.answers("send-tails", self._send)
        peers.on_leave = self._leave
        peers.on_disconnected.append(self._disconnected)

    async def _follow(self, sender: int, name: str) -> bool:
        """Send the tail of a stream from now on; False if the stream is not here, or may not be read."""
        peer = self._peers.get(sender)
        try:
            stream = self.engine.look_up(name, touch=True)
        except Refusal:
            return False
        if peer is None:
            return False
        self._leave(sender, stream.id)
        sent = self._sent[sender, stream.id] = SentTail(self, peer, stream)
        self.engine.follow(stream, sent, relaying=True)
        sent.begin()
        return True

    async def _send(self, sender: int, stream_ids: Sequence[int]) -> None:
        """Send everything that was acknowledged of these streams before the answer."""
        self.engine.expire_due()
        for stream_id in stream_ids:
            sent = self._sent.get((sender, stream_id))
            if sent is not None:
                sent.catch_up()

    def _leave(self, sender: int, stream_id: int) -> None:
        sent = self._sent.pop((sender, stream_id), None)
        if sent is not None:
            self.engine.unfollow(sent.stream, sent, relaying=True)

    def _disconnected(self, worker: int) -> None:
        for sender, stream_id in list(self._sent):
            if sender == worker:
                self._leave(sender, stream_id)

    def forget(self, sent: SentTail) -> None:
        for key, found in list(self._sent.items()):
            if found is sent:
                self._leave(*key)


class SentTail:
    """The cursor of one worker in one stream, like that of any live reader."""

    def __init__(self, tails: Tails, peer: Peer, stream: LiveStream) -> None:
        self._tails = tails
        self._peer = peer
        self.stream: Final = stream
        self._at = Offset(0, 0)
        self._state: FedStream | None = None
        self._is_due = False

    def begin(self) -> None:
        self._at = self._window()
        self._update(is_first=True)

    def wake(self) -> None:
        if not self._peer.is_congested:
            self.catch_up()
        elif not self._is_due:
            self._is_due = True
            self._tails.loop.call_later(CONGESTED_S, self._again)

    def catch_up(self) -> None:
        """Send what is new, also to a worker that does not keep up: its readers wait for what was acknowledged."""
        if described(self.stream) != self._state:
            self._update(is_first=False)

    def gone(self, refusal: Refusal) -> None:
        self._tails.forget(self)
        self._peer.send(frames.TAIL, 0, encode(TailGone(self.stream.id)))

    def _again(self) -> None:
        self._is_due = False
        if self.stream.followers is not None and self in self.stream.followers:
            self.wake()

    def _update(self, *, is_first: bool) -> None:
        stream, reader = self.stream, self._tails.engine.reader
        tail = Offset(stream.durable_index, stream.durable_position)
        start = self._at
        if start.message_index < stream.durable_retained_index or (
            tail.byte_position - start.byte_position > UPDATE_MAX_BYTES
        ):
            start = tail
        lengths: Sequence[int] = ()
        data = b""
        if start < tail:
            chunk = reader.chunk(stream, start, UPDATE_MAX_BYTES)
            data, lengths = b"".join(reader.buffers(chunk)), reader.lengths(chunk)
        self._at = tail
        state = self._state = described(stream)
        update = TailUpdate(state, is_first, start.message_index, start.byte_position, lengths, data)
        self._peer.send(frames.TAIL, 0, encode(update))

    def _window(self) -> Offset:
        """The first boundary within `WINDOW_BYTES` of the tail."""
        stream, reader = self.stream, self._tails.engine.reader
        if self._tails.engine.deferring is not None:
            # Data before the tail may have to be fetched first.
            return Offset(stream.durable_index, stream.durable_position)
        low, high = stream.durable_retained_index, stream.durable_index
        first = stream.durable_position - WINDOW_BYTES
        while low < high:
            middle = (low + high) // 2
            byte_position = reader.boundary(stream, middle)
            if byte_position is not None and byte_position >= first:
                high = middle
            else:
                low = middle + 1
        byte_position = reader.boundary(stream, low)
        return (
            Offset(low, byte_position)
            if byte_position is not None
            else Offset(stream.durable_index, stream.durable_position)
        )
