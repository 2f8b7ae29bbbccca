"""Offsets with an incarnation are accepted for that incarnation and refused for others."""

from __future__ import annotations

import pytest

from headwater.core.errors import Conflict, InvalidOffset, OffsetGone, Refusal, StreamRecreated
from headwater.core.offsets import ZERO, Offset, format_token
from headwater.engine.stream import LiveStream
from tests.engine.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig(disk=False)


def stream_of(rig: Rig, name: str, *messages: bytes) -> LiveStream:
    rig.put(name)
    for message in messages:
        rig.post(name, message)
    return rig.engine.look_up(name)


def fork_of(rig: Rig, name: str, source: LiveStream, offset: Offset) -> LiveStream:
    rig.put(name, source=source.name, offset=str(offset))
    return rig.engine.look_up(name)


def token(stream: LiveStream, message_index: int, byte_position: int) -> str:
    return format_token(message_index, byte_position, stream.id)


def resolve(rig: Rig, stream: LiveStream, text: str) -> Offset:
    return rig.engine.reader.resolve(stream, text)


def test_offset_with_incarnation_resolves_like_one_without(rig: Rig) -> None:
    stream = stream_of(rig, "s", b"one", b"two")
    assert resolve(rig, stream, token(stream, 1, 3)) == resolve(rig, stream, str(Offset(1, 3))) == Offset(1, 3)
    assert resolve(rig, stream, token(stream, 0, 0)) == ZERO


def test_an_offset_of_a_deleted_stream_is_refused_by_the_next_stream_of_that_name(rig: Rig) -> None:
    old = stream_of(rig, "s", b"one", b"two")
    rig.delete("s")
    new = stream_of(rig, "s", b"neu", b"zwo")
    with pytest.raises(StreamRecreated) as refused:
        resolve(rig, new, token(old, 1, 3))
    assert isinstance(refused.value, OffsetGone)
    assert (refused.value.status, refused.value.code) == (410, "stream_recreated")
    assert f"{old.id:016x}" in refused.value.detail
    assert f"{new.id:016x}" in refused.value.detail
    assert resolve(rig, new, str(Offset(1, 3))) == Offset(1, 3)


def test_incarnation_is_checked_before_the_position(rig: Rig) -> None:
    """A position that the new stream does not have yet must not be reported as a malformed offset."""
    old = stream_of(rig, "s", b"one", b"two")
    rig.delete("s")
    new = stream_of(rig, "s")
    for place in ((1, 3), (2, 6), (0, 0)):
        with pytest.raises(StreamRecreated):
            resolve(rig, new, token(old, *place))


def test_a_fork_accepts_the_offsets_of_its_source_up_to_the_fork_point(rig: Rig) -> None:
    source = stream_of(rig, "source", b"one", b"two", b"three")
    fork = fork_of(rig, "fork", source, Offset(2, 6))
    rig.post("fork", b"drei!")
    for place in (ZERO, Offset(1, 3), Offset(2, 6)):
        assert resolve(rig, fork, format_token(place.message_index, place.byte_position, source.id)) == place
        assert resolve(rig, fork, format_token(place.message_index, place.byte_position, fork.id)) == place
    assert resolve(rig, fork, token(fork, 3, 11)) == Offset(3, 11)
    with pytest.raises(InvalidOffset, match="is after the fork point of"):
        resolve(rig, fork, token(source, 3, 11))
    with pytest.raises(StreamRecreated):
        resolve(rig, source, token(fork, 1, 3))


def test_nested_fork_accepts_the_offsets_shared_at_each_fork_point(rig: Rig) -> None:
    first = stream_of(rig, "first", b"1", b"2", b"3", b"4")
    second = fork_of(rig, "second", first, Offset(3, 3))
    rig.post("second", b"d")
    late = fork_of(rig, "late", second, Offset(4, 4))
    early = fork_of(rig, "early", second, Offset(2, 2))
    assert resolve(rig, late, token(first, 3, 3)) == Offset(3, 3)
    assert resolve(rig, late, token(second, 4, 4)) == Offset(4, 4)
    assert resolve(rig, early, token(first, 2, 2)) == Offset(2, 2)
    for fork, other, place in ((late, first, (4, 4)), (early, first, (3, 3)), (early, second, (3, 3))):
        with pytest.raises(InvalidOffset, match="is after the fork point of"):
            resolve(rig, fork, token(other, *place))


def test_a_fork_accepts_the_offsets_of_a_source_that_was_deleted(rig: Rig) -> None:
    source = stream_of(rig, "source", b"one", b"two")
    fork = fork_of(rig, "fork", source, Offset(1, 3))
    rig.delete("source")
    assert resolve(rig, fork, token(source, 1, 3)) == Offset(1, 3)


def test_fork_at_an_offset_with_the_source_incarnation_is_created(rig: Rig) -> None:
    source = stream_of(rig, "source", b"one", b"two")
    rig.put("fork", source="source", offset=token(source, 1, 3))
    assert rig.engine.look_up("fork").base == Offset(1, 3)
    # The same request with an offset in the old format, such as a retry across an upgrade, is the same fork.
    assert not isinstance(rig.put("fork", source="source", offset=str(Offset(1, 3)))[0], Refusal)
    assert isinstance(rig.put("fork", source="source", offset=str(Offset(2, 6)))[0], Conflict)


def test_a_fork_at_an_offset_of_a_deleted_source_is_refused(rig: Rig) -> None:
    old = stream_of(rig, "source", b"one")
    rig.delete("source")
    stream_of(rig, "source", b"eins")
    assert isinstance(rig.put("fork", source="source", offset=token(old, 1, 3))[0], StreamRecreated)


def test_a_snapshot_at_an_offset_of_a_deleted_stream_is_refused(rig: Rig) -> None:
    old = stream_of(rig, "ds/b/s", b"one")
    rig.delete("ds/b/s")
    new = stream_of(rig, "ds/b/s", b"neu")
    with pytest.raises(StreamRecreated):
        rig.engine.snapshots.check("ds/b/s", token(old, 1, 3))
    assert rig.engine.snapshots.check("ds/b/s", token(new, 1, 3)) == (new, Offset(1, 3))
    assert rig.engine.snapshots.check("ds/b/s", str(Offset(1, 3))) == (new, Offset(1, 3))
