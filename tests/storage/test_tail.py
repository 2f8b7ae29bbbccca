"""A `Tail` against the plain list of messages that it stands for, in every size that its blocks treat differently."""

from __future__ import annotations

from random import Random

import pytest

from headwater.storage import tail as module
from headwater.storage.tail import SHARED_MAX_BYTES, WHOLE_BYTES, Tail


@pytest.mark.parametrize("seed", range(8))
def test_reads_cuts_and_drops_match_the_plain_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 2_560)
    monkeypatch.setattr(module, "WHOLE_BYTES", 640)
    monkeypatch.setattr(module, "SHARED_MAX_BYTES", 4_000)
    random = Random(seed)
    tail, base = Tail(5, 1_000), 1_000
    data, ends = b"", [1_000]
    for _ in range(300):
        lengths = [random.choice((1, 7, 90, 639, 640, 2_000, 5_000)) for _ in range(random.choice((1, 1, 1, 4)))]
        payload = random.randbytes(sum(lengths))
        kept = tail.read(tail.position, tail.end_position) if random.random() < 0.1 else []
        before = b"".join(kept)
        tail.extend(payload, lengths)
        assert b"".join(kept) == before, "what was read does not change"
        data += payload
        for length in lengths:
            ends.append(ends[-1] + length)
        if random.random() < 0.1:
            tail.drop(random.randrange(tail.index, tail.end_index + 1))
        assert (tail.end_position, tail.size) == (ends[-1], ends[-1] - tail.position)
        start = random.randrange(tail.index, tail.end_index + 1)
        end = random.randrange(start, tail.end_index + 1)
        first, last = ends[start - 5], ends[end - 5]
        assert tail.boundary(start) == first
        assert b"".join(tail.read(first, last)) == data[first - base : last - base]
        assert tail.lengths(start, end) == [ends[at + 1 - 5] - ends[at - 5] for at in range(start, end)]


def test_large_payload_is_kept_without_a_copy() -> None:
    tail = Tail(0, 0)
    tail.extend(b"small", (5,))
    payload = b"x" * WHOLE_BYTES
    tail.extend(payload, (len(payload),))
    tail.extend(b"after", (5,))
    (view,) = tail.read(5, 5 + len(payload))
    assert isinstance(view, memoryview)
    assert view.obj is payload


def test_reader_of_a_small_part_does_not_keep_a_very_large_payload() -> None:
    tail = Tail(0, 0)
    size = SHARED_MAX_BYTES + 1
    tail.extend(b"x" * size, (size,))
    (piece,) = tail.read(0, 10)
    assert type(piece) is bytes


def test_dropping_most_of_a_block_gives_its_memory_back() -> None:
    tail = Tail(0, 0)
    tail.extend(b"x" * (2 * WHOLE_BYTES), (WHOLE_BYTES, WHOLE_BYTES))
    tail.drop(1)
    assert [memoryview(view.obj).nbytes for view in tail.views(WHOLE_BYTES, 2 * WHOLE_BYTES)] == [WHOLE_BYTES]
