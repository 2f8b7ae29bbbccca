"""The order in which the streams of a bucket are listed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from sortedcontainers import SortedList

from headwater.engine.buckets import ids_from

ids = st.text(st.sampled_from("abé日🙂-"), max_size=4)


@settings(deadline=None)
@given(st.sets(ids), ids, st.none() | ids)
def test_ids_with_a_prefix_are_listed_in_order_after_an_id(found: set[str], prefix: str, after: str | None) -> None:
    expected = [name for name in sorted(found) if name.startswith(prefix) and (after is None or name > after)]
    assert list(ids_from(SortedList(found), prefix, after)) == expected


@given(st.sets(ids))
def test_order_of_code_points_is_the_order_of_bytes(found: set[str]) -> None:
    assert list(SortedList(found)) == sorted(found, key=lambda name: name.encode())
