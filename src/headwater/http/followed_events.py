"""The encoded events of a follower of many streams.

`FollowedEvents` is the interface for a connection. This implementation is for the engine in this process.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from headwater.core.errors import Refusal, StreamNotFound
from headwater.engine.engine import Engine
from headwater.engine.multi_stream_follow import FollowBeginning, FollowedChunk, FollowProblem, FollowRequest
from headwater.engine.reading import ReadChunk
from headwater.http.headers import offset_text
from headwater.http.scopes import Scope

LARGE_BYTES: Final = 256 * 1024
"""For a larger message, the event has only its offset, and the client reads it from its stream."""
_encode: Final = msgspec.json.Encoder().encode


class EncodedEvent(NamedTuple):
    """One event without its id."""

    name: str
    """The stream that is sent up to `offset` with this event; empty for a problem."""
    offset: str
    data: bytes
    """If empty, nothing is sent: the stream begins at `offset`, which was `now`."""
    gone: str = ""
    """The stream that no longer exists, if that is the problem."""


class FollowedEvents(Protocol):
    """The events for a connection: `on_ready` is called when there may be more."""

    @property
    def failure(self) -> Refusal | None:
        """Why the events cannot continue, or None."""

    @property
    def has_ended(self) -> bool:
        """Whether the events end here; the client continues with another connection."""

    @property
    def is_complete(self) -> bool:
        """Whether all streams that existed at the start have been added."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def next_event(self) -> EncodedEvent | None:
        """The next event to send; None if there is none now."""


OpenEvents: TypeAlias = Callable[[FollowRequest, Scope, Callable[[], None]], FollowedEvents]


class LocalEvents:
    """The events of streams of one engine."""

    has_ended = False

    def __init__(
        self,
        engine: Engine,
        wanted: FollowRequest,
        scope: Scope,
        on_ready: Callable[[], None],
        is_here: Callable[[str], bool] | None = None,
    ) -> None:
        self._engine = engine
        self._follower = engine.follows.follow(wanted, scope.allows, on_ready, is_here)
        self.start = self._follower.start
        self.close = self._follower.close

    @property
    def failure(self) -> Refusal | None:
        return self._follower.failure

    @property
    def is_complete(self) -> bool:
        return self._follower.is_complete

    def next_event(self) -> EncodedEvent | None:
        event = self._follower.next_event()
        if event is None:
            return None
        if isinstance(event, FollowProblem):
            problem = encoded_problem(event.name, event.refusal)
            return problem._replace(gone=event.name) if isinstance(event.refusal, StreamNotFound) else problem
        if isinstance(event, FollowBeginning):
            return EncodedEvent(event.name, offset_text(event.stream.id, event.offset), b"")
        return self._encoded(event)

    def _encoded(self, event: FollowedChunk) -> EncodedEvent:
        chunk = event.chunk
        offset = offset_text(chunk.stream.id, chunk.end)
        self._engine.metrics.read_bytes += chunk.length
        members = [
            b'{"stream":%b,"contentType":%b,"streamNextOffset":"%b"'
            % (_encode(event.name), _encode(chunk.stream.type.header), offset.encode())
        ]
        if chunk.up_to_date:
            members.append(b'"upToDate":true')
        if chunk.closed:
            members.append(b'"streamClosed":true')
        if chunk.length > LARGE_BYTES and chunk.end.message_index == chunk.start.message_index + 1:
            members.append(b'"large":{"offset":"%b"}' % offset_text(chunk.stream.id, chunk.start).encode())
        elif chunk.length:
            members.append(self._messages(chunk))
        return EncodedEvent(event.name, offset, b",".join(members) + b"}")

    def _messages(self, chunk: ReadChunk) -> bytes:
        reader = self._engine.reader
        data = b"".join(reader.buffers(chunk))
        if chunk.stream.type.json:
            return b'"messages":[%b]' % data[:-1]
        messages, at = [], 0
        for length in reader.lengths(chunk):
            messages.append(data[at : at + length])
            at += length
        if chunk.stream.type.text:
            try:
                return b'"messages":%b' % _encode([message.decode("utf-8") for message in messages])
            except UnicodeDecodeError:
                pass
        return b'"encoding":"base64","messages":%b' % _encode([b64encode(message).decode() for message in messages])


def encoded_problem(name: str, refusal: Refusal) -> EncodedEvent:
    members = {"stream": name, "status": refusal.status, "code": refusal.code, "detail": refusal.detail}
    return EncodedEvent("", "", _encode(members))
