"""Rows of a shard: earlier releases stored producers without the time of their last use."""

from __future__ import annotations

import msgspec

from headwater.core.producers import ProducerState
from headwater.storage.acid.rows import _seal, decode_producer, encode_producer, producer_key


def test_producer_row_keeps_the_time_of_last_use() -> None:
    key, state = producer_key(7, "p"), ProducerState(1, 2, b"digests!", 1_700_000_000_000)
    assert decode_producer(key, encode_producer(key, "p", state)) == ("p", state)


def test_producer_row_of_an_earlier_release_is_readable() -> None:
    key = producer_key(7, "p")
    row = _seal(key, msgspec.msgpack.encode(("p", 1, 2, b"digests!")))
    assert decode_producer(key, row) == ("p", ProducerState(1, 2, b"digests!", 0))
