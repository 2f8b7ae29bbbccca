"""Compare a `Tail` with a plain list of messages, in every size that its blocks treat differently."""

from __future__ import annotations

from random import Random

import pytest

from headwater.storage import tail as module
from headwater.storage.tail import OWN_BLOCK_BYTES, SHARED_MAX_BYTES, Tail


@pytest.mark.parametrize("seed", range(8))
def test_reads_cuts_and_drops_match_the_plain_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 2_560)
    monkeypatch.setattr(module, "OWN_BLOCK_BYTES", 640)
    monkeypatch.setattr(module, "SHARED_MAX_BYTES", 4_000)
    random = Random(seed)
    tail, base = Tail(5, 1_000), 1_000
    data, ends = b"", [1_000]
    times, at_ms, latest = [0] * 5, 100, 0
    for _ in range(300):
        lengths = [random.choice((1, 7, 90, 639, 640, 2_000, 5_000)) for _ in range(random.choice((1, 1, 1, 4)))]
        payload = random.randbytes(sum(lengths))
        kept = tail.read(tail.byte_position, tail.end_position) if random.random() < 0.1 else []
        before = b"".join(kept)
        at_ms += random.choice((0, 0, 1, 5, -3))
        latest = max(latest, at_ms) if tail.ends else at_ms
        tail.extend(payload, lengths, at_ms)
        assert b"".join(kept) == before, "returned bytes must not change"
        data += payload
        for length in lengths:
            ends.append(ends[-1] + length)
            times.append(latest)
        if random.random() < 0.1:
            tail.drop(random.randrange(tail.message_index, tail.end_index + 1))
        assert (tail.end_position, tail.size) == (ends[-1], ends[-1] - tail.byte_position)
        start = random.randrange(tail.message_index, tail.end_index + 1)
        end = random.randrange(start, tail.end_index + 1)
        first, last = ends[start - 5], ends[end - 5]
        assert tail.boundary(start) == first
        assert b"".join(tail.read(first, last)) == data[first - base : last - base]
        arrivals = [run.at_ms for run in tail.arrivals(start, end) for _ in range(run.messages)]
        assert arrivals == times[start:end], "times never decrease, even if the clock is set back"
        since = random.randint(90, latest + 10)
        later = (at for at in range(tail.message_index, tail.end_index) if times[at] >= since)
        assert tail.first_since(since) == next(later, tail.end_index)
        assert tail.lengths(start, end) == [ends[at + 1 - 5] - ends[at - 5] for at in range(start, end)]


def test_large_payload_is_kept_without_a_copy() -> None:
    tail = Tail(0, 0)
    tail.extend(b"small", (5,), 1)
    payload = b"x" * OWN_BLOCK_BYTES
    tail.extend(payload, (len(payload),), 1)
    tail.extend(b"after", (5,), 1)
    (view,) = tail.read(5, 5 + len(payload))
    assert isinstance(view, memoryview)
    assert view.obj is payload


def test_reader_of_a_small_part_does_not_keep_a_very_large_payload() -> None:
    tail = Tail(0, 0)
    size = SHARED_MAX_BYTES + 1
    tail.extend(b"x" * size, (size,), 1)
    (piece,) = tail.read(0, 10)
    assert type(piece) is bytes


def test_dropping_most_of_a_block_frees_its_memory() -> None:
    tail = Tail(0, 0)
    tail.extend(b"x" * (2 * OWN_BLOCK_BYTES), (OWN_BLOCK_BYTES, OWN_BLOCK_BYTES), 1)
    tail.drop(1)
    assert [memoryview(view.obj).nbytes for view in tail.views(OWN_BLOCK_BYTES, 2 * OWN_BLOCK_BYTES)] == [
        OWN_BLOCK_BYTES
    ]
