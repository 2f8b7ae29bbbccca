"""The catalog: the same records give the same state, and a deleted source is removed with the last fork of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.catalog import Catalog, StreamState
from headwater.core.offsets import Offset
from headwater.core.records import Append, Create, Delete, ForkPoint, Image, Record, Touch, decode_record, encode_record

T0 = 1_000_000


def catalog_of(*records: Record) -> Catalog[StreamState]:
    catalog: Catalog[StreamState] = Catalog(StreamState)
    for record in records:
        catalog.apply(record)
    return catalog


def create(stream_id: int, name: str, payload: bytes = b"", **more: object) -> Create:
    lengths = (len(payload),) if payload else ()
    return Create(stream_id, name, T0, "text/plain", payload=payload, lengths=lengths, **more)  # type: ignore[arg-type]


def fork(stream_id: int, name: str, source: StreamState, payload: bytes = b"") -> Create:
    point = ForkPoint(source.id, source.name, source.message_index, source.byte_position)
    return create(stream_id, name, payload, fork=point)


def append(stream: StreamState, payload: bytes, **more: object) -> Append:
    at_ms = T0 + 5
    return Append(stream.id, at_ms, stream.message_index, stream.byte_position, payload, (len(payload),), **more)  # type: ignore[arg-type]


def producers_of(stream: StreamState) -> dict[str, tuple[int, int]]:
    return {name: (known.epoch, known.seq) for name, known in (stream.producers or {}).items()}


def state(catalog: Catalog[StreamState]) -> dict[int, tuple[Image, int, bool]]:
    """The whole state of a catalog: each stream's image, its forks, and whether its name refers to it."""
    return {
        stream.id: (stream.image(), stream.children, catalog.by_name.get(stream.name) is stream) for stream in catalog
    }


# -- creating and appending


def test_a_new_stream_is_empty_open_and_found_by_name_and_id() -> None:
    catalog = catalog_of(create(1, "a"))
    stream = catalog.by_name["a"]
    assert catalog.by_id[1] is stream
    assert stream.tail == Offset(0, 0)
    assert (stream.closed, stream.deleted, stream.children, stream.producers) == (False, False, 0, None)
    assert stream.created_ms == stream.accessed_ms == stream.written_ms == T0
    assert len(catalog) == 1


def test_create_may_include_content_and_closure() -> None:
    stream = catalog_of(create(1, "a", b"abc", closed=True)).by_name["a"]
    assert (stream.tail, stream.closed) == (Offset(1, 3), True)


def test_an_append_moves_the_tail_and_the_times() -> None:
    catalog = catalog_of(create(1, "a", b"abc"))
    stream = catalog.by_id[1]
    catalog.apply(Append(1, T0 + 9, 1, 3, b"xyz", (1, 2)))
    assert stream.tail == Offset(3, 6)
    assert stream.accessed_ms == stream.written_ms == T0 + 9


def test_append_updates_producer_sequence_and_closure() -> None:
    catalog = catalog_of(create(1, "a"))
    stream = catalog.by_id[1]
    catalog.apply(append(stream, b"x", producer_id="p", epoch=2, seq=0, stream_seq="s1"))
    assert producers_of(stream) == {"p": (2, 0)}
    assert (stream.stream_seq, stream.closed, stream.closed_by) == ("s1", False, None)
    catalog.apply(append(stream, b"y", producer_id="p", epoch=2, seq=1, close=True))
    assert (producers_of(stream), stream.stream_seq) == ({"p": (2, 1)}, "s1")
    assert (stream.closed, stream.closed_by) == (True, ("p", 2, 1))


def test_a_close_without_a_producer_has_no_closer() -> None:
    catalog = catalog_of(create(1, "a"))
    catalog.apply(Append(1, T0, 0, 0, b"", (), close=True))
    assert (catalog.by_id[1].closed, catalog.by_id[1].closed_by) == (True, None)


@pytest.mark.parametrize(("message_index", "byte_position"), [(0, 0), (1, 2), (2, 3), (1, 4)])
def test_append_record_that_is_not_at_the_tail_raises(message_index: int, byte_position: int) -> None:
    catalog = catalog_of(create(1, "a", b"abc"))
    with pytest.raises(AssertionError):
        catalog.apply(Append(1, T0, message_index, byte_position, b"x", (1,)))
    assert catalog.by_id[1].tail == Offset(1, 3)


def test_touch_never_moves_the_last_use_back() -> None:
    catalog = catalog_of(create(1, "a"), Touch(1, T0 + 50), Touch(1, T0 + 20))
    stream = catalog.by_id[1]
    assert (stream.accessed_ms, stream.written_ms) == (T0 + 50, T0)


def test_an_incarnation_never_mixes_with_its_successor() -> None:
    catalog = catalog_of(create(1, "a", b"old", ttl_secs=5), Delete(1, T0), create(2, "a"))
    stream = catalog.by_name["a"]
    assert (stream.id, stream.tail, stream.ttl_secs) == (2, Offset(0, 0), None)
    assert 1 not in catalog.by_id


@pytest.mark.parametrize(
    ("ttl_secs", "expires_at_ms", "last_alive_ms"),
    [(10, None, T0 + 10_000 - 1), (None, T0 + 7, T0 + 6), (0, None, T0 - 1)],
)
def test_stream_expires_at_its_deadline_and_not_before(
    ttl_secs: int | None, expires_at_ms: int | None, last_alive_ms: int
) -> None:
    stream = catalog_of(create(1, "a", ttl_secs=ttl_secs, expires_at_ms=expires_at_ms)).by_id[1]
    assert not stream.expired(last_alive_ms)
    assert stream.expired(last_alive_ms + 1)


def test_stream_without_expiry_never_expires() -> None:
    stream = catalog_of(create(1, "a")).by_id[1]
    assert stream.deadline_ms() is None
    assert not stream.expired(2**62)


# -- forks


def test_a_fork_continues_the_offsets_of_its_source() -> None:
    catalog = catalog_of(create(1, "a", b"abc"))
    catalog.apply(fork(2, "b", catalog.by_id[1], b"xy"))
    stream = catalog.by_id[2]
    assert (stream.base, stream.tail) == (Offset(1, 3), Offset(2, 5))
    assert catalog.by_id[1].children == 1


def test_a_fork_does_not_inherit_writers_nor_closure() -> None:
    catalog = catalog_of(create(1, "a"))
    source = catalog.by_id[1]
    catalog.apply(append(source, b"x", producer_id="p", epoch=0, seq=0, stream_seq="s", close=True))
    catalog.apply(fork(2, "b", source))
    stream = catalog.by_id[2]
    assert (stream.producers, stream.stream_seq, stream.closed, stream.closed_by) == (None, None, False, None)


def test_source_with_forks_is_soft_deleted_and_removed_with_the_last_fork() -> None:
    catalog = catalog_of(create(1, "a"))
    source = catalog.by_id[1]
    catalog.apply(fork(2, "b", source))
    catalog.apply(fork(3, "c", source))
    assert catalog.apply(Delete(1, T0)) == ()
    assert source.deleted
    assert catalog.by_name["a"] is source
    assert catalog.apply(Delete(2, T0)) == (2,)
    assert catalog.apply(Delete(3, T0)) == (3, 1)
    assert state(catalog) == {}
    assert not catalog.by_name


def test_source_stays_when_its_forks_are_deleted() -> None:
    catalog = catalog_of(create(1, "a"))
    catalog.apply(fork(2, "b", catalog.by_id[1]))
    assert catalog.apply(Delete(2, T0)) == (2,)
    assert catalog.by_id[1].children == 0
    assert catalog.apply(Delete(1, T0)) == (1,)


def test_chain_of_deleted_sources_is_removed_up_to_the_first_existing_stream() -> None:
    catalog = catalog_of(create(1, "a"))
    for id_ in range(2, 6):
        catalog.apply(fork(id_, f"n{id_}", catalog.by_id[id_ - 1]))
    for id_ in (4, 2, 3):
        assert catalog.apply(Delete(id_, T0)) == ()
    assert catalog.apply(Delete(5, T0)) == (5, 4, 3, 2)
    assert state(catalog).keys() == {1}
    assert catalog.by_id[1].children == 0


trees = st.lists(st.integers(min_value=0), min_size=1, max_size=12).map(
    lambda picks: [None, *[pick % (at + 1) for at, pick in enumerate(picks)]]
)
"""A tree of forks: for each stream after the first, the earlier one that it was forked from."""


@given(trees, st.randoms(use_true_random=False))
def test_forks_may_be_deleted_in_any_order_and_the_last_frees_the_sources(
    tree: list[int | None], random: object
) -> None:
    catalog: Catalog[StreamState] = Catalog(StreamState)
    for at, source in enumerate(tree):
        catalog.apply(create(at, f"n{at}") if source is None else fork(at, f"n{at}", catalog.by_id[source]))
    order = list(range(len(tree)))
    random.shuffle(order)  # type: ignore[attr-defined]
    deleted: set[int] = set()
    for at in order:
        held = needed(tree, deleted)
        gone = catalog.apply(Delete(at, T0))
        deleted.add(at)
        assert set(gone) == held - needed(tree, deleted)
        assert set(catalog.by_id) == needed(tree, deleted)
        for stream in catalog:
            assert stream.deleted == (stream.id in deleted)
            assert stream.children == sum(1 for child in catalog.by_id if tree[child] == stream.id)
            assert catalog.by_name[stream.name] is stream
    assert len(catalog) == len(catalog.by_name) == 0


def needed(tree: list[int | None], deleted: set[int]) -> set[int]:
    """The streams that must be kept: those that are not deleted, and all that they were forked from."""
    kept: set[int] = set()
    for at in range(len(tree)):
        if at not in deleted:
            line: int | None = at
            while line is not None:
                kept.add(line)
                line = tree[line]
    return kept


# -- histories: images and records restore any state


@dataclass(frozen=True)
class Step:
    """A random step; `records_of` turns it into the nearest record that the rules allow."""

    kind: str
    pick: int
    name: str
    payload: bytes
    producer: str | None
    number: int
    close: bool


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["create", "fork", "append", "append", "delete", "touch"]),
        st.integers(min_value=0, max_value=99),
        st.sampled_from("abcdef"),
        st.binary(min_size=1, max_size=4),
        st.sampled_from([None, "p", "q"]),
        st.integers(min_value=0, max_value=3),
        st.booleans(),
    ),
    max_size=30,
)


def records_of(wishes: list[Step]) -> list[Record]:
    """Any sequence of records that the rules allow."""
    catalog: Catalog[StreamState] = Catalog(StreamState)
    records: list[Record] = []
    for stream_id, wish in enumerate(wishes, 1):
        record = record_of(catalog, stream_id, wish)
        if record is not None:
            catalog.apply(record)
            records.append(record)
    return records


def record_of(catalog: Catalog[StreamState], stream_id: int, wish: Step) -> Record | None:
    usable = [stream for stream in catalog if not stream.deleted]
    if not usable or wish.kind in {"create", "fork"}:
        if wish.name in catalog.by_name:
            return None
        if usable and wish.kind == "fork":
            return fork(stream_id, wish.name, usable[wish.pick % len(usable)], wish.payload)
        return create(stream_id, wish.name, wish.payload, ttl_secs=9 if wish.close else None)
    stream = usable[wish.pick % len(usable)]
    if wish.kind == "delete":
        return Delete(stream.id, T0)
    if wish.kind == "touch" or stream.closed:
        return Touch(stream.id, T0 + wish.pick)
    who = {"producer_id": wish.producer, "epoch": wish.number, "seq": wish.number} if wish.producer else {}
    return append(stream, wish.payload, stream_seq=wish.producer and wish.name, close=wish.close, **who)


histories = steps.map(records_of)


def encoded_and_decoded(records: Iterable[Record]) -> list[Record]:
    return [decode_record(encode_record(record)) for record in records]


@given(histories)
def test_the_same_records_give_the_same_catalog(records: list[Record]) -> None:
    assert state(catalog_of(*encoded_and_decoded(records))) == state(catalog_of(*records))


@given(histories, st.randoms(use_true_random=False))
def test_images_in_any_order_restore_the_whole_state(records: list[Record], random: object) -> None:
    original = catalog_of(*records)
    images: list[Record] = [stream.image() for stream in original]
    random.shuffle(images)  # type: ignore[attr-defined]
    assert state(catalog_of(*encoded_and_decoded(images))) == state(original)


@given(histories, st.integers(min_value=0, max_value=25))
def test_images_and_the_records_after_them_equal_all_records(records: list[Record], cut: int) -> None:
    checkpoint: list[Record] = [stream.image() for stream in catalog_of(*records[:cut])]
    assert state(catalog_of(*encoded_and_decoded([*checkpoint, *records[cut:]]))) == state(catalog_of(*records))


@given(histories)
def test_image_shares_no_state_with_its_stream(records: list[Record]) -> None:
    catalog = catalog_of(*records)
    images = {stream.id: stream.image() for stream in catalog}
    encoded = {id_: encode_record(image) for id_, image in images.items()}
    for stream in catalog:
        if not stream.closed and not stream.deleted:
            catalog.apply(append(stream, b"!", producer_id="p", epoch=9, seq=9))
    assert {id_: encode_record(image) for id_, image in images.items()} == encoded
