"""The rules for creating and appending: whether a request is allowed in a given state of the stream.

Each rule is a pure function from (state, request, now) to a decision; a decision that changes something contains the
record of the change. Order of checks on an append: closed, content type, producer, Stream-Seq (protocol §5.2), so
that closure is always reported, and a producer's retry is a duplicate before it could be a regression.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from headwater.core.buckets import check_new_name, is_bucketed
from headwater.core.catalog import StreamState
from headwater.core.content import (
    DEFAULT_CONTENT_TYPE,
    Messages,
    check_content_type,
    media_type,
    split_body,
    split_json,
)
from headwater.core.errors import (
    BadRequest,
    ConfigMismatch,
    Conflict,
    ContentTypeMismatch,
    EmptyBody,
    InvalidOffset,
    OffsetGone,
    SequenceRegression,
    StreamClosed,
    StreamRecreated,
)
from headwater.core.expiry import format_instant
from headwater.core.offsets import Offset, format_token, same_offset
from headwater.core.producers import ProducerHeaders, Verdict, digest, judge
from headwater.core.records import Append, Create, ForkPoint, RetentionPolicy

CLOSED_HEADER: Final = ("Stream-Closed", "true")


class AppendOutcome(enum.Enum):
    """The result of an append."""

    ACCEPTED = enum.auto()
    DUPLICATE = enum.auto()
    ALREADY_CLOSED = enum.auto()


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Which stream to fork, and where: an offset token (None is its tail) and a distance after it."""

    source_name: str
    offset: str | None
    sub_offset: int


@dataclass(frozen=True, slots=True)
class CreateRequest:
    name: str
    content_type: str | None
    ttl_secs: int | None
    expires_at_ms: int | None
    closed: bool
    body: bytes
    fork: ForkRequest | None = None
    retention: RetentionPolicy | None = None
    messages: Messages | None = None
    """The body, already split into messages; None if the rules are to split it."""
    fenced: bool = False
    """Only the current claim of a subscription may write to it (see `fencing`)."""

    def split(self, content_type: str) -> Messages:
        """The messages that the body adds to a stream of this type."""
        if self.messages is not None:
            return self.messages
        return split_body(content_type, self.body, creating=True)


def decide_create(request: CreateRequest, stream_id: int, now_ms: int, *, tracks_age: bool = False) -> Create:
    """The record that creates a stream, with its initial content."""
    check_new_name(request.name)
    content_type = request.content_type or DEFAULT_CONTENT_TYPE
    messages = request.split(content_type)
    return Create(
        stream_id,
        request.name,
        now_ms,
        content_type,
        request.ttl_secs,
        request.expires_at_ms,
        request.closed,
        messages.payload,
        messages.lengths,
        retention=request.retention,
        tracks_age=tracks_age,
    )


def decide_fork(
    request: CreateRequest,
    source: StreamState,
    point: ForkPoint,
    stream_id: int,
    now_ms: int,
    *,
    tracks_age: bool = False,
) -> Create:
    """The record of a fork. It inherits the content type, the expiry unless the request has one, but no producers."""
    check_new_name(request.name)
    check_retained(source.id, Offset(point.message_index, point.byte_position), source.retained)
    if source.snapshot is not None and source.retained_index and not is_bucketed(request.name):
        raise Conflict(
            "The source begins with a snapshot, which only a fork below /ds/ can serve; create the fork in a bucket."
        )
    if request.content_type is not None and media_type(request.content_type) != source.type.media:
        raise ContentTypeMismatch(
            f"A fork has the content type of its source, {source.type.header}, not {request.content_type}; send that"
            " one or none."
        )
    messages = request.split(source.type.header)
    # Messages after the fork point are never older than those before it, even if the clock was set back.
    now_ms = max(now_ms, source.written_ms)
    inherits = request.ttl_secs is None and request.expires_at_ms is None
    return Create(
        stream_id,
        request.name,
        now_ms,
        source.type.header,
        source.ttl_secs if inherits else request.ttl_secs,
        source.expires_at_ms if inherits else request.expires_at_ms,
        request.closed,
        messages.payload,
        messages.lengths,
        point,
        source.retained_index,
        source.retained_position,
        source.snapshot if is_bucketed(request.name) else None,
        request.retention if request.retention is not None else source.retention,
        tracks_age,
    )


def check_same_config(stream: StreamState, request: CreateRequest) -> None:
    """PUT on a stream that exists succeeds only with the same configuration (protocol §5.1)."""
    if (request.fork is not None) != (stream.fork is not None):
        raise _mismatch(f"as {'a fork' if stream.fork is not None else 'a stream that is not a fork'}")
    if request.fork is not None and stream.fork is not None:
        _check_same_fork(stream.fork, request.fork)
    is_fork = stream.fork is not None
    if not is_fork or request.content_type is not None:
        requested_type = media_type(request.content_type or DEFAULT_CONTENT_TYPE)
        if requested_type != stream.type.media:
            raise _mismatch(f"with content type {stream.type.header}, not {requested_type}")
    inherits = is_fork and request.ttl_secs is None and request.expires_at_ms is None
    if not inherits and request.ttl_secs != stream.ttl_secs:
        if stream.ttl_secs is None:
            raise _mismatch("without a Stream-TTL")
        raise _mismatch(f"with Stream-TTL {stream.ttl_secs}")
    if not inherits and request.expires_at_ms != stream.expires_at_ms:
        if stream.expires_at_ms is None:
            raise _mismatch("without a Stream-Expires-At")
        raise _mismatch(f"with Stream-Expires-At {format_instant(stream.expires_at_ms)}")
    if request.retention != stream.retention and not (is_fork and request.retention is None):
        raise _mismatch("with another retention")
    if request.closed != stream.closed:
        raise _mismatch(f"and is {'closed' if stream.closed else 'open'}")


def _mismatch(existing: str) -> ConfigMismatch:
    return ConfigMismatch(f"The stream exists {existing}. Use it as it is, delete it first, or choose another name.")


def decide_append(
    stream: StreamState,
    content_type: str | None,
    body: bytes,
    producer: ProducerHeaders | None,
    stream_seq: str | None,
    close: bool,
    now_ms: int,
    messages: Messages | None = None,
) -> Append | AppendOutcome:
    """Decide on an append: the record of an accepted one, or the outcome of one that changes nothing.

    `messages` is a JSON body that is split already; a body of any other type is one message.
    """
    # The times of a stream's messages never decrease, even if the clock is set back.
    now_ms = max(now_ms, stream.written_ms)
    if not body and not close:
        raise EmptyBody("The body is empty. Send data, or Stream-Closed: true to close the stream.")
    if stream.closed:
        return _on_closed(stream, body, producer)
    if body:
        if content_type is None:
            raise BadRequest(f"Content-Type is missing; send the stream's, {stream.type.header}.")
        if content_type != stream.type.header:
            check_content_type(content_type)
            if media_type(content_type) != stream.type.media:
                raise ContentTypeMismatch(
                    f"The stream's content type is {stream.type.header}, not {content_type}; send the stream's."
                )
    if producer is not None:
        known = stream.producers.get(producer.id) if stream.producers is not None else None
        if judge(known, producer) is Verdict.DUPLICATE:
            if body:
                return AppendOutcome.DUPLICATE
            # The producer's append is stored already, but the stream is open and the request closes it (§5.3).
            return Append(stream.id, now_ms, stream.message_index, stream.byte_position, b"", (), close=True)
    # Header values are decoded as Latin-1, so the order of the strings is the order of the bytes.
    if stream_seq is not None and stream.stream_seq is not None and stream_seq <= stream.stream_seq:
        # The official PHP client searches for the words "sequence conflict".
        raise SequenceRegression(
            f"sequence conflict: Stream-Seq {stream_seq!r} is not greater than {stream.stream_seq!r}. Read the new"
            " messages, then append with a greater value."
        )
    if messages is not None:
        payload, lengths = messages
    else:
        payload, lengths = split_json(body) if body and stream.type.json else (body, (len(body),) if body else ())
    producer_id, epoch, seq = producer if producer is not None else (None, 0, 0)
    return Append(
        stream.id,
        now_ms,
        stream.message_index,
        stream.byte_position,
        payload,
        lengths,
        producer_id,
        epoch,
        seq,
        stream_seq,
        close,
        digest(body) if producer is not None else 0,
    )


def _check_same_fork(point: ForkPoint, requested: ForkRequest) -> None:
    if point.source_name != requested.source_name:
        raise _mismatch(f"as a fork of {point.source_name!r}")
    if not same_offset(point.requested_offset, requested.offset) or point.requested_sub_offset != requested.sub_offset:
        raise _mismatch("as a fork of the same source at another offset")


def check_retained(stream_id: int, offset: Offset, earliest: Offset) -> None:
    """Refuse a read before the earliest retained offset."""
    if offset < earliest:
        raise offset_gone(stream_id, earliest)


def offset_gone(stream_id: int, earliest: Offset) -> OffsetGone:
    token = format_token(earliest.message_index, earliest.byte_position, stream_id)
    return OffsetGone(
        f"Offsets before {token} are no longer retained; bootstrap again, or read from that offset.",
        (("Stream-Earliest-Offset", token),),
    )


def stream_recreated(name: str, incarnation: int, other: int) -> StreamRecreated:
    return StreamRecreated(
        f"The offset belongs to incarnation {other:016x} of {name!r}, which was deleted; the stream that has the name"
        f" now is incarnation {incarnation:016x}. Start again from offset -1."
    )


def off_boundary(token: str) -> InvalidOffset:
    return InvalidOffset(
        f"Offset {token!r} is not a message boundary of this stream; use an offset returned by the server."
    )


def _on_closed(stream: StreamState, body: bytes, producer: ProducerHeaders | None) -> AppendOutcome:
    if producer is not None and stream.closed_by == (producer.id, producer.epoch, producer.seq):
        return AppendOutcome.DUPLICATE
    if not body:
        # Closing is idempotent, with any producer headers (§5.2, §5.2.1).
        return AppendOutcome.ALREADY_CLOSED
    raise StreamClosed(
        "The stream is closed and accepts no more data; append to another stream.",
        (CLOSED_HEADER, ("Stream-Next-Offset", format_token(stream.message_index, stream.byte_position, stream.id))),
    )
