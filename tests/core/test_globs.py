"""Globs: what patterns mean, what the index finds, and which patterns are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import InvalidSubscription
from headwater.core.globs import Glob, GlobIndex, compile_glob

MAX = 1024


def matches(pattern: str, name: str) -> bool:
    """The meaning of a pattern, written down as plainly as can be: the index must agree with it."""

    def rest(pattern: tuple[str, ...], segments: list[str]) -> bool:
        if not pattern:
            return not segments
        first, *others = pattern
        if first == "**":
            return any(rest(tuple(others), segments[taken:]) for taken in range(len(segments) + 1))
        if not segments:
            return False
        fits = first == "*" or first.replace("%2A", "*").replace("%2a", "*") == segments[0]
        return fits and rest(tuple(others), segments[1:])

    return rest(compile_glob(pattern, MAX).segments, name.split("/"))


def found(pattern: str, name: str) -> bool:
    index: GlobIndex[str] = GlobIndex()
    index.add(compile_glob(pattern, MAX), "it")
    return index.match(name) == ["it"]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("events/*", "events/a", True),
        ("events/*", "events", False),
        ("events/*", "events/a/b", False),
        ("events/**", "events", True),
        ("events/**", "events/a/b/c", True),
        ("**", "anything/at/all", True),
        ("**/tail", "tail", True),
        ("**/tail", "a/b/tail", True),
        ("**/tail", "a/b/tail/c", False),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b/z/c/z", True),
        ("a/**/z", "a/b/y", False),
        ("a/**/b/**/c", "a/b/b/c/b/c", True),
        ("*/*", "a/b", True),
        ("*/*", "a", False),
        ("*", "a", True),
        ("plain", "plain", True),
        ("plain", "Plain", False),
        ("/slashes/around/", "slashes/around", True),
        ("a/**/**/b", "a/b", True),
        ("star/%2A", "star/*", True),
        ("star/%2a", "star/x", False),
        ("ünï/*", "ünï/код", True),
    ],
)
def test_what_a_pattern_matches(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected
    assert found(pattern, name) is expected


@pytest.mark.parametrize("pattern", ["", "/", "a//b", "events-*", "*a", "a/***", "__ds/x", "a\x00b", "x" * 1025])
def test_patterns_that_could_not_mean_what_they_say_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidSubscription):
        compile_glob(pattern, MAX)


def test_a_pattern_has_a_bounded_number_of_segments() -> None:
    with pytest.raises(InvalidSubscription):
        compile_glob("/".join("a" * 129), MAX)


segments = st.sampled_from(["a", "b", "c"])
patterns = st.lists(segments | st.sampled_from(["*", "**", "**"]), min_size=1, max_size=6).map("/".join)
names = st.lists(segments, min_size=1, max_size=7).map("/".join)


@given(st.lists(patterns, max_size=12), st.lists(names, max_size=6))
def test_the_index_finds_exactly_the_patterns_that_match_each_once(written: list[str], asked: list[str]) -> None:
    index: GlobIndex[int] = GlobIndex()
    for number, pattern in enumerate(written):
        index.add(compile_glob(pattern, MAX), number)
    for name in asked:
        hits = index.match(name)
        assert len(hits) == len(set(hits))
        assert set(hits) == {number for number, pattern in enumerate(written) if matches(pattern, name)}


@given(st.lists(patterns, max_size=10), st.data())
def test_taking_patterns_out_leaves_the_others_and_in_the_end_nothing(written: list[str], data: st.DataObject) -> None:
    index: GlobIndex[int] = GlobIndex()
    globs = [compile_glob(pattern, MAX) for pattern in written]
    for number, glob in enumerate(globs):
        index.add(glob, number)
    left = set(range(len(globs)))
    for number in data.draw(st.permutations(range(len(globs)))):
        index.discard(globs[number], number)
        left.discard(number)
        name = data.draw(names)
        assert set(index.match(name)) == {other for other in left if matches(written[other], name)}
    assert index.is_empty


def test_taking_out_what_is_not_there_changes_nothing() -> None:
    index: GlobIndex[str] = GlobIndex()
    index.add(compile_glob("a/*", MAX), "kept")
    index.discard(compile_glob("a/b", MAX), "other")
    index.discard(compile_glob("a/*", MAX), "other")
    assert index.match("a/b") == ["kept"]


def test_a_name_is_not_tried_against_every_pattern() -> None:
    """With a thousand patterns of other beginnings, a name looks at no more nodes than with one."""

    class Counting(dict[str, Any]):
        looks = 0

        def get(self, *arguments: Any) -> Any:
            Counting.looks += 1
            return super().get(*arguments)

    index: GlobIndex[int] = GlobIndex()
    for number in range(1000):
        index.add(Glob((f"tenant-{number}", "*", "**")), number)
    index._root.literals = Counting(index._root.literals)
    assert index.match("tenant-7/orders/today") == [7]
    assert Counting.looks == 1
