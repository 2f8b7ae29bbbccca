"""Streams with many producers: a checkpoint does not block the event loop or hold the GIL for long."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import msgspec
import pytest

from headwater.core.producers import ProducerState
from headwater.core.records import Document, ForkPoint, Image
from headwater.storage.packs import states
from headwater.storage.packs.states import LARGE_BYTES, PRODUCERS_AT_ONCE, decode_state, encode_state
from tests.storage.packs.test_checkpoints import ONE_STEP_PER_TEND_S, ROOMY, Bench
from tests.storage.simulation import SimulatedProcess


def image_with(producers: int) -> Image:
    known = {f"producer {number}": ProducerState(number, 2, b"digest") for number in range(producers)}
    fork = ForkPoint(3, "source", 4, 5)
    return Image(1, "s", 2, "text/plain", 60, None, 5, 6, 7, 8, True, ("a", 1, 2), "seq", known, fork)


@pytest.mark.parametrize(
    "producers", [0, 1, PRODUCERS_AT_ONCE, PRODUCERS_AT_ONCE + 1, 3 * PRODUCERS_AT_ONCE + 17, 70_000]
)
def test_an_image_encoded_in_pieces_decodes_to_itself(producers: int) -> None:
    image = image_with(producers)
    encoded = encode_state(image)
    assert msgspec.msgpack.decode(encoded, type=Image) == image
    assert decode_state(memoryview(encoded)) == image


def test_a_large_document_decodes_to_itself() -> None:
    document = Document("key", b"v" * (2 * LARGE_BYTES))
    assert decode_state(encode_state(document)) == document


def test_a_large_image_of_an_earlier_release_is_decoded() -> None:
    """The states of producers had no digests and no time of last use, and the last fields did not exist."""
    ids = [f"producer {number}" for number in range(10_000)]
    stored = ["image", 1, "s", 2, "text/plain", None, None, 5, 6, 7, 8, False, None, None, {id_: [3, 4] for id_ in ids}]
    image = decode_state(msgspec.msgpack.encode(stored))
    assert isinstance(image, Image)
    assert image.producers == {id_: ProducerState(3, 4) for id_ in ids}
    assert (image.name, image.written_ms, image.ages) == ("s", 8, None)


def test_decoding_a_large_image_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is never idle is saved from its last image, which is decoded on the thread of the worker.

    The interpreter can switch to another thread only where Python code is called.
    """
    image = image_with(50_000)
    encoded = encode_state(image)
    decode = states._decode
    largest = calls = 0

    def watched(data: bytes) -> Image | Document:
        nonlocal largest
        largest = max(largest, len(data))
        return decode(data)

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name == "__post_init__"

    monkeypatch.setattr(states, "_decode", watched)
    sys.setprofile(count)
    try:
        decoded = decode_state(encoded)
    finally:
        sys.setprofile(None)
    assert decoded == image
    assert calls == len(image.producers)
    assert largest < LARGE_BYTES


def test_each_encoder_call_handles_at_most_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = msgspec.msgpack.Encoder().encode
    largest = 0

    def watched(value: Any) -> bytes:
        nonlocal largest
        encoded = encode(value)
        largest = max(largest, len(encoded))
        return encoded

    monkeypatch.setattr(states, "_encode", watched)
    image = image_with(50_000)
    whole = encode_state(image)
    assert msgspec.msgpack.decode(whole, type=Image) == image
    assert largest < len(whole) / 20


def test_a_slice_of_a_checkpoint_copies_and_releases_one_large_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normally the clock is checked after every sixteen streams."""
    monkeypatch.setattr(states, "PRODUCERS_AT_ONCE", 2)
    bench = Bench(replace(ROOMY, clock_check_every=16))
    process = bench.process
    for number in range(32):
        process.create(f"s{number}", b"x")
        process.commit()
    known = {f"p{number}": ProducerState(0, 0) for number in range(3)}
    asked = 0

    def image_of(stream_id: int) -> Image | None:
        nonlocal asked
        asked += 1
        image = SimulatedProcess.image_of(process, stream_id)
        return msgspec.structs.replace(image, producers=known) if image is not None else None

    process.image_of = image_of  # type: ignore[method-assign]
    assert ONE_STEP_PER_TEND_S > 0.002
    process.storage.checkpoint_soon()
    per_tend: list[int] = []
    for _ in range(32):
        before = asked
        process.maintain()
        per_tend.append(asked - before)
    assert max(per_tend) == 1
    bench.finish()
    assert process.storage.usage().memory_bytes == 0
