"""Compare floors with a direct computation of which stream reads which message from where."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.catalog import Catalog, StreamState
from headwater.core.floors import floors, own_start
from headwater.core.records import Create, Delete, ForkPoint, Retain

SIZE = 3
"""Size of every message in bytes."""


@dataclass(frozen=True)
class Plan:
    """A fork: its source and fork point, what it appends and retains, and whether it is deleted."""

    source: int
    at: int
    own: int
    retained: int
    deleted: bool


plans = st.lists(
    st.builds(
        Plan,
        st.integers(0, 30),
        st.integers(0, 12),
        st.integers(0, 6),
        st.integers(0, 12),
        st.booleans(),
    ),
    max_size=8,
)


def build(first: Plan, forks: list[Plan]) -> Catalog[StreamState]:
    catalog: Catalog[StreamState] = Catalog(StreamState)
    made: list[StreamState] = []
    for number, plan in enumerate([first, *forks], 1):
        fork = None
        base = retained = 0
        if made:
            source = made[plan.source % len(made)]
            retained = source.retained_index
            base = max(retained, min(plan.at, source.message_index))
            fork = ForkPoint(source.id, source.name, base, base * SIZE)
        payload = bytes(SIZE * plan.own)
        catalog.apply(
            Create(
                number,
                f"s{number}",
                0,
                "text/plain",
                payload=payload,
                lengths=(SIZE,) * plan.own,
                fork=fork,
                retained_index=retained,
                retained_position=retained * SIZE,
            )
        )
        stream = catalog.by_id[number]
        made.append(stream)
        index = max(retained, min(plan.retained, base + plan.own))
        catalog.apply(Retain(number, 0, index, index * SIZE))
    for stream, plan in zip(made, [first, *forks], strict=True):
        if plan.deleted and stream.id in catalog.by_id:
            catalog.apply(Delete(stream.id, 0))
    return catalog


def read_from(catalog: Catalog[StreamState], reader: StreamState, index: int) -> StreamState:
    """Return the stream whose own data contains a message."""
    owner = reader
    while index < owner.base_index:
        assert owner.fork is not None
        owner = catalog.by_id[owner.fork.source_id]
    return owner


@given(st.builds(Plan, st.just(0), st.just(0), st.integers(0, 12), st.integers(0, 12), st.booleans()), plans)
def test_readable_messages_are_at_or_after_the_floor(first: Plan, forks: list[Plan]) -> None:
    catalog = build(first, forks)
    found = floors(catalog)
    assert found.keys() == catalog.by_id.keys()
    for reader in catalog:
        if not reader.deleted:
            for index in range(reader.retained_index, reader.message_index):
                owner = read_from(catalog, reader, index)
                assert own_start(owner, found[owner.id]).message_index <= index


@given(st.builds(Plan, st.just(0), st.just(0), st.integers(0, 12), st.integers(0, 12), st.just(False)))
def test_without_forks_the_floor_is_the_first_retained_message(first: Plan) -> None:
    catalog = build(first, [])
    assert floors(catalog) == {1: catalog.by_id[1].retained}


def test_a_deleted_source_keeps_only_what_its_fork_reads() -> None:
    catalog = build(Plan(0, 0, 10, 0, deleted=True), [Plan(0, 6, 2, 4, deleted=False)])
    source = catalog.by_id[1]
    assert source.deleted
    assert own_start(source, floors(catalog)[1]).message_index == 4
