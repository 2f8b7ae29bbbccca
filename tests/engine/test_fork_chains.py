"""Chains of forks: the cost of a read depends on the streams it reads from, not on the depth of the chain."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.records import Retain
from headwater.engine import range_splits
from headwater.engine.quota import EngineLimits
from headwater.engine.stream import LiveStream
from headwater.storage.interface import CorruptError
from tests.engine.rig import Rig, status

DEPTH = 3000
STEPS_MAX = 60
"""A little more than twice the base-2 logarithm of the depth."""


class CountedStream:
    """Counts reads of the position where a stream's own data begins: one per step along a chain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        for name in ("base_index", "base_position"):
            slot: Any = getattr(LiveStream.__mro__[1], name)
            monkeypatch.setattr(LiveStream, name, property(self._counted(slot), slot.__set__), raising=False)

    def _counted(self, slot: Any) -> Any:
        def get(stream: LiveStream) -> Any:
            self.steps += 1
            return slot.__get__(stream)

        return get


def deep(depth: int = DEPTH) -> Rig:
    """A chain in which every stream adds one message of two bytes."""
    rig = Rig(disk=False)
    rig.put("s0", b"00")
    for number in range(1, depth):
        rig.put(f"s{number}", b"%02d" % (number % 100), source=f"s{number - 1}")
    return rig


@pytest.fixture(scope="module")
def chain() -> Rig:
    rig = deep()
    rig.read(f"s{DEPTH - 1}")
    return rig


@pytest.mark.parametrize("message_index", [0, 1, DEPTH // 2, DEPTH - 2])
def test_read_of_a_few_messages_takes_few_steps(
    chain: Rig, message_index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = chain.engine.look_up(f"s{DEPTH - 1}")
    reader = chain.engine.reader
    counted = CountedStream(monkeypatch)
    assert reader.boundary(stream, message_index) == 2 * message_index
    chunk = reader.chunk(stream, Offset(message_index, 2 * message_index), 2)
    assert b"".join(reader.buffers(chunk)) == b"%02d" % (message_index % 100)
    assert 0 < counted.steps < 4 * STEPS_MAX


def test_splits_take_few_steps_each(chain: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = chain.engine.look_up(f"s{DEPTH - 1}")
    counted = CountedStream(monkeypatch)
    answers = split(chain, stream, 1000)
    chain.scheduler.run_until_idle()
    (ends,) = answers
    assert len(ends) == 1000
    assert ends[-1] == stream.tail
    assert 0 < counted.steps < 1000 * 2 * STEPS_MAX


def test_deleting_a_leaf_of_a_deep_chain_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = deep(1000)
    counted = CountedStream(monkeypatch)
    rig.delete("s999")
    assert 0 < counted.steps < STEPS_MAX


def test_fork_without_its_own_data_is_skipped() -> None:
    rig = Rig(disk=False)
    rig.put("s0", b"shared")
    for number in range(1, 100):
        rig.put(f"s{number}", source=f"s{number - 1}")
    stream = rig.engine.look_up("s99")
    assert rig.read("s99") == b"shared"
    assert stream.lineage is not None
    assert stream.lineage.origin.name == "s0"
    assert stream.lineage.generation == 99


@pytest.mark.parametrize("seed", range(30))
def test_forks_at_any_point_read_what_their_sources_had(seed: int) -> None:
    """Compare with plain lists of messages; some forks are at or before the fork point of their source."""
    random = Random(seed)
    rig = Rig(disk=False)
    rig.put("s0")
    messages: dict[str, list[bytes]] = {"s0": []}
    for number in range(1, 60):
        for _ in range(random.randrange(4)):
            name = random.choice(list(messages))
            body = bytes([random.randrange(256)]) * random.randrange(1, 6)
            rig.post(name, body)
            messages[name].append(body)
        source = random.choice(list(messages)[-5:])
        at = random.randrange(len(messages[source]) + 1)
        offset = Offset(at, sum(map(len, messages[source][:at])))
        assert status(rig.put(f"s{number}", source=source, offset=str(offset))) is None
        messages[f"s{number}"] = messages[source][:at]
    reader = rig.engine.reader
    for name, expected in messages.items():
        stream = rig.engine.look_up(name)
        for limit in (1, 7, 1000):
            assert rig.read(name, limit) == b"".join(expected)
        byte_position = 0
        for message_index, body in enumerate(expected):
            assert reader.boundary(stream, message_index) == byte_position
            chunk = reader.chunk(stream, Offset(message_index, byte_position), 10_000)
            assert reader.lengths(chunk) == [len(each) for each in expected[message_index:]]
            byte_position += len(body)
        answers = split(rig, stream, 5)
        rig.scheduler.run_until_idle()
        (ends,) = answers
        assert [end.message_index for end in ends] == sorted({end.message_index for end in ends})
        assert not expected or ends[-1] == stream.tail


def test_depth_is_limited() -> None:
    rig = Rig(disk=False, limits=EngineLimits(max_fork_depth=3))
    rig.put("s0", b"x")
    for number in range(1, 4):
        assert status(rig.put(f"s{number}", source=f"s{number - 1}")) is None
    refused = rig.put("s4", source="s3")
    assert status(refused) == 409
    assert isinstance(refused[0], Refusal)
    assert "max_fork_depth" in refused[0].detail
    assert status(rig.put("other", source="s2")) is None


# -- splits in slices


def split(rig: Rig, stream: LiveStream, count: int) -> list[Any]:
    answers: list[Any] = []
    rig.engine.split(stream, Offset(0, 0), stream.tail, count, lambda _, end: end, answers.append)
    return answers


def test_splits_of_a_large_range_take_several_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_splits, "SLICE_S", 0.0)
    rig = Rig(disk=False)
    stream = rig.created("a")
    for _ in range(50):
        rig.post("a", b"0123456789")
    answers = split(rig, stream, 10)
    for _ in range(9):
        assert answers == []
        rig.scheduler.tick()
    rig.scheduler.run_until_idle()
    assert [end.message_index for end in answers[0]] == list(range(5, 51, 5))


@pytest.mark.parametrize("ending", ["deleted", "trimmed", "damaged"])
def test_stream_that_ends_while_it_is_split_is_refused(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_splits, "SLICE_S", 0.0)
    rig = Rig(disk=False)
    stream = rig.created("a")
    for _ in range(50):
        rig.post("a", b"0123456789")
    answers = split(rig, stream, 10)
    if ending == "deleted":
        rig.delete("a")
    elif ending == "trimmed":
        rig.engine.retain(stream, Retain(stream.id, 0, 40, 400), None, None)
    else:

        def damaged(*_: Any) -> Any:
            raise CorruptError("damaged")

        monkeypatch.setattr(rig.storage, "cut", damaged)
    rig.scheduler.run_until_idle()
    [refusal] = answers
    assert isinstance(refusal, Refusal)
    assert refusal.code == {"deleted": "stream_not_found", "trimmed": "offset_gone", "damaged": "data_corrupt"}[ending]


def test_first_messages_of_a_range() -> None:
    rig = Rig(disk=False)
    stream = rig.created("a", b"0123456789")
    rig.post("a", b"01234")
    reader = rig.engine.reader
    assert reader.first_messages(stream, Offset(0, 0), stream.tail, 1) == Offset(1, 10)
    assert reader.first_messages(stream, Offset(0, 0), stream.tail, 2) == stream.tail
    assert reader.first_messages(stream, Offset(1, 10), stream.tail, 5) == stream.tail


def test_deleted_fork_keeps_its_data_while_a_fork_reads_through_it() -> None:
    rig = Rig(disk=False)
    rig.created("a", b"7")
    rig.created("b", b"x", source="a")
    rig.created("c", source="b", offset=str(Offset(1, 1)))
    rig.delete("b")
    rig.scheduler.run_until_idle()
    assert rig.engine.total_bytes == rig.engine.storage_usage().payload_bytes == 2
    rig.delete("c")
    rig.scheduler.run_until_idle()
    assert rig.engine.total_bytes == rig.engine.storage_usage().payload_bytes == 1
