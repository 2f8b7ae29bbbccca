"""Names in order: the same as a sorted set, at any size and after any history."""

from __future__ import annotations

import time
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core import ordered
from headwater.core.ordered import RUN_MAX, OrderedNames

names = st.text(st.sampled_from("abé日🙂-"), max_size=4)


@settings(deadline=None)
@given(st.lists(names), names, st.none() | names)
def test_walking_gives_the_names_with_a_prefix_behind_a_place(found: list[str], prefix: str, after: str | None) -> None:
    index = OrderedNames(found)
    expected = [name for name in sorted(set(found)) if name.startswith(prefix) and (after is None or name > after)]
    assert list(index.walk(prefix, after)) == expected
    assert len(index) == len(set(found))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400).map(lambda n: f"{n * 7919 % 401:03d}")), max_size=600))
def test_any_history_gives_the_same_as_a_set(steps: list[tuple[bool, str]]) -> None:
    """With runs of four names, so that they split and vanish all the time."""
    run_max = ordered.RUN_MAX
    ordered.RUN_MAX = 4  # type: ignore[misc]
    try:
        index, expected = OrderedNames(), set[str]()
        for adds, name in steps:
            (index.add if adds else index.discard)(name)
            (expected.add if adds else expected.discard)(name)
            assert (name in index) == (name in expected)
            assert len(index) == len(expected)
        assert list(index.walk("", None)) == sorted(expected)
        for name in sorted(expected)[::10]:
            assert list(index.walk("", name)) == sorted(other for other in expected if other > name)
    finally:
        ordered.RUN_MAX = run_max  # type: ignore[misc]


def test_hundreds_of_thousands_of_names_are_found_as_fast_as_a_few() -> None:
    index = OrderedNames(f"{number:07d}" for number in range(300_000))
    started = time.perf_counter()
    for number in range(2000):
        index.add(f"{number * 149:07d}-new")
        assert f"{number * 149:07d}" in index
        assert len(list(islice(index.walk("0", f"{number * 149:07d}"), 3))) <= 3
        index.discard(f"{number * 149:07d}")
    # One list of them all would be shifted twice each time.
    assert time.perf_counter() - started < 1.0
    assert len(index) == 300_000
    assert RUN_MAX >= 512
