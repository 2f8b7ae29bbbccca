"""Idempotent producers: which appends are new, which are duplicates, and which are from a fenced-off producer.

The rules are the table of protocol §5.2.1. A producer is known per stream by its id; its epoch never decreases, and
within an epoch its sequence numbers have no gap.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from itertools import islice
from typing import Final, NamedTuple

from headwater.core.checksum import crc32
from headwater.core.errors import InvalidProducer, SequenceGap, StaleEpoch

DIGEST_BYTES: Final = 8
DIGESTS_KEPT: Final = 16
"""Appends of an epoch whose digest is known: enough for the chunks of one batch of a pipeline."""
_DIGESTS_KEPT_BYTES: Final = (DIGESTS_KEPT - 1) * DIGEST_BYTES
NUMBER_MAX: Final = 2**53 - 1
ID_MAX_BYTES: Final = 1024
"""Size of a producer id."""

_NUMBER: Final = re.compile(r"[0-9]{1,16}", re.ASCII)


class ProducerHeaders(NamedTuple):
    """The values of a request's three producer headers."""

    id: str
    epoch: int
    seq: int


class ProducerState(NamedTuple):
    """The state of a producer in a stream: the last accepted append, and digests of the last few."""

    epoch: int
    seq: int
    digests: bytes = b""
    """Digests of the last appends of the epoch, up to and including `seq`, each `DIGEST_BYTES` long."""
    used_ms: int = 0
    """When the last append was accepted. 0 in states that earlier releases stored, until they are loaded."""


def digest(body: bytes) -> int:
    """The digest of a body: its checksum and its length, in 64 bits."""
    return crc32(body) << 32 | len(body)


def remember(state: ProducerState | None, epoch: int, seq: int, body_digest: int, now_ms: int) -> ProducerState:
    """The state after an accepted append."""
    earlier = state.digests[-_DIGESTS_KEPT_BYTES:] if state is not None and state.epoch == epoch else b""
    return ProducerState(epoch, seq, earlier + body_digest.to_bytes(DIGEST_BYTES, "big"), now_ms)


def dated(states: Mapping[str, ProducerState], written_ms: int) -> dict[str, ProducerState]:
    """Set missing times of last use to the last write to the stream, the latest time that is possible."""
    return {id_: state if state.used_ms else state._replace(used_ms=written_ms) for id_, state in states.items()}


def idle_producers(states: Mapping[str, ProducerState], used_until_ms: int, most: int) -> tuple[str, ...]:
    """Return up to `most` producers whose last append was accepted at this time or before."""
    return tuple(islice((id_ for id_, state in states.items() if state.used_ms <= used_until_ms), most))


def digest_of_repeat(state: ProducerState, seq: int) -> int | None:
    """The digest of an earlier append of the epoch, or None if it is no longer kept."""
    end = len(state.digests) - (state.seq - seq) * DIGEST_BYTES
    return int.from_bytes(state.digests[end - DIGEST_BYTES : end], "big") if end >= DIGEST_BYTES else None


class Verdict(enum.Enum):
    NEW = enum.auto()
    DUPLICATE = enum.auto()


def parse_producer(id_: str | None, epoch: str | None, seq: str | None) -> ProducerHeaders | None:
    """The producer headers of a request: all three, or None if there are none."""
    if id_ is None and epoch is None and seq is None:
        return None
    if id_ is None or epoch is None or seq is None:
        raise InvalidProducer("Producer-Id, Producer-Epoch and Producer-Seq go together; send all three or none.")
    if not id_:
        raise InvalidProducer("Producer-Id is empty; send an id that no other producer of the stream uses.")
    if len(id_.encode("utf-8", "surrogatepass")) > ID_MAX_BYTES:
        raise InvalidProducer(f"Producer-Id is longer than {ID_MAX_BYTES} bytes; use a shorter id.")
    return ProducerHeaders(id_, _number("Producer-Epoch", epoch), _number("Producer-Seq", seq))


def judge(state: ProducerState | None, producer: ProducerHeaders) -> Verdict:
    """Decide whether an append is new or a duplicate; raises if it is neither."""
    if state is None or producer.epoch > state.epoch:
        if producer.seq == 0:
            return Verdict.NEW
        if state is not None:
            raise InvalidProducer(
                f"Epoch {producer.epoch} is new, so its first Producer-Seq must be 0, not {producer.seq}."
            )
        raise _gap(expected=0, received=producer.seq)
    if producer.epoch < state.epoch:
        raise StaleEpoch(
            f"Epoch {producer.epoch} of producer {producer.id!r} was taken over by epoch {state.epoch}. Stop this"
            " writer,"
            f" or continue with epoch {state.epoch + 1} and Producer-Seq 0.",
            (("Producer-Epoch", str(state.epoch)),),
        )
    if producer.seq <= state.seq:
        return Verdict.DUPLICATE
    if producer.seq > state.seq + 1:
        raise _gap(expected=state.seq + 1, received=producer.seq)
    return Verdict.NEW


def _gap(*, expected: int, received: int) -> SequenceGap:
    return SequenceGap(
        f"Expected Producer-Seq {expected}, received {received}: an earlier append is missing. Send Producer-Seq"
        f" {expected} first.",
        (("Producer-Expected-Seq", str(expected)), ("Producer-Received-Seq", str(received))),
    )


def _number(header: str, text: str) -> int:
    if _NUMBER.fullmatch(text) is None or int(text) > NUMBER_MAX:
        raise InvalidProducer(f"{header} must be a whole number from 0 to {NUMBER_MAX}, not {text!r}.")
    return int(text)
