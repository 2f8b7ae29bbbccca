"""Idempotent producers: which appends are new, which are repeats, and which come from a zombie.

The rules are the table of protocol §5.2.1. A producer is known per stream by its id; its epoch never goes back, and
within an epoch its sequence numbers have no gap.
"""

from __future__ import annotations

import enum
import re
from typing import Final, NamedTuple

from headwater.core.errors import InvalidProducer, SequenceGap, StaleEpoch

NUMBER_MAX: Final = 2**53 - 1
ID_MAX_BYTES: Final = 1024

_NUMBER: Final = re.compile(r"[0-9]{1,16}", re.ASCII)


class Producer(NamedTuple):
    """Who appends, as a request's three producer headers say."""

    id: str
    epoch: int
    seq: int


class ProducerState(NamedTuple):
    """What a stream remembers of a producer: the last append that it accepted."""

    epoch: int
    seq: int


class Verdict(enum.Enum):
    NEW = enum.auto()
    DUPLICATE = enum.auto()


def parse_producer(id_: str | None, epoch: str | None, seq: str | None) -> Producer | None:
    """The producer of a request: all three headers, or none of them."""
    if id_ is None and epoch is None and seq is None:
        return None
    if id_ is None or epoch is None or seq is None:
        raise InvalidProducer("Producer-Id, Producer-Epoch and Producer-Seq go together: send all three or none.")
    if not id_:
        raise InvalidProducer("Producer-Id must not be empty.")
    if len(id_.encode("utf-8", "surrogatepass")) > ID_MAX_BYTES:
        raise InvalidProducer(f"Producer-Id must not be longer than {ID_MAX_BYTES} bytes.")
    return Producer(id_, _number("Producer-Epoch", epoch), _number("Producer-Seq", seq))


def judge(state: ProducerState | None, producer: Producer) -> Verdict:
    """Whether an append is new or a repeat; raises when it is neither."""
    if state is None or producer.epoch > state.epoch:
        if producer.seq == 0:
            return Verdict.NEW
        if state is not None:
            raise InvalidProducer(f"A new epoch starts with Producer-Seq 0, not {producer.seq}.")
        raise _gap(expected=0, received=producer.seq)
    if producer.epoch < state.epoch:
        raise StaleEpoch(
            f"Epoch {producer.epoch} of producer {producer.id!r} was taken over by epoch {state.epoch}.",
            (("Producer-Epoch", str(state.epoch)),),
        )
    if producer.seq <= state.seq:
        return Verdict.DUPLICATE
    if producer.seq > state.seq + 1:
        raise _gap(expected=state.seq + 1, received=producer.seq)
    return Verdict.NEW


def _gap(*, expected: int, received: int) -> SequenceGap:
    return SequenceGap(
        f"Expected Producer-Seq {expected}, received {received}: an earlier append is missing.",
        (("Producer-Expected-Seq", str(expected)), ("Producer-Received-Seq", str(received))),
    )


def _number(header: str, text: str) -> int:
    if _NUMBER.fullmatch(text) is None or int(text) > NUMBER_MAX:
        raise InvalidProducer(f"{header} must be a whole number from 0 to {NUMBER_MAX}, not {text!r}.")
    return int(text)
