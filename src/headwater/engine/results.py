"""Results of the engine's operations, returned when their records are durable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.producers import ProducerHeaders, digest_of_repeat
from headwater.core.rules import AppendOutcome
from headwater.engine.stream import LiveStream


class Created(msgspec.Struct, frozen=True, gc=False):
    stream: LiveStream
    is_new: bool
    tail: Offset
    closed: bool


class Appended(msgspec.Struct, frozen=True, gc=False):
    outcome: AppendOutcome
    tail_index: int
    tail_position: int
    closed: bool
    producer: ProducerHeaders | None
    """The producer of the request, with the highest sequence number that the stream has accepted from it."""
    stream_id: int = 0
    """The incarnation that was appended to."""
    digest: int | None = None
    """For a duplicate: the digest of the accepted body, if it is still kept."""


class Deleted(msgspec.Struct, frozen=True, gc=False):
    name: str


OnCreated: TypeAlias = Callable[[Created | Refusal], None]
OnAppended: TypeAlias = Callable[[Appended | Refusal], None]
OnDeleted: TypeAlias = Callable[[Deleted | Refusal], None]


def accepted_producer(stream: LiveStream, producer: ProducerHeaders | None) -> ProducerHeaders | None:
    """The producer with the highest sequence number that the stream has accepted in its epoch, if there is one."""
    state = stream.producers.get(producer.id) if producer is not None and stream.producers is not None else None
    if producer is None or state is None or state.epoch != producer.epoch:
        return None
    return producer._replace(seq=state.seq)


def duplicate_append(stream: LiveStream, producer: ProducerHeaders | None) -> Appended:
    """The result of a duplicate: the producer's highest sequence number, and the digest of the accepted body."""
    assert producer is not None, "only a request with a producer can be a duplicate"
    assert stream.producers is not None, "a duplicate has an original"
    state = stream.producers[producer.id]
    digest = digest_of_repeat(state, producer.seq)
    producer = producer._replace(seq=state.seq)
    return Appended(
        AppendOutcome.DUPLICATE, stream.message_index, stream.byte_position, stream.closed, producer, stream.id, digest
    )
