"""Globs: what patterns mean, what the index finds, and which patterns are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core import globs
from headwater.core.globs import Glob, GlobIndex, compile_glob
from headwater.core.subscription_errors import InvalidSubscription
from tests.measured import cpu_s, least

MAX = 1024


def matches(pattern: str, name: str) -> bool:
    """A simple reference implementation of patterns, with which the index must agree."""

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
        ("/ds/agents/*", "/ds/agents/a", True),
        ("/ds/agents/*", "/ds/others/a", False),
        ("/ds/*/log", "/ds/agents/log", True),
        ("/ds/**", "/ds/agents/a", True),
        ("/ds/agents/**", "/ds/agents/a", True),
        ("/ds/**/log", "/ds/agents/log", True),
        ("/ds/agents/*", "ds/agents/a", False),
        ("ds/agents/*", "/ds/agents/a", False),
    ],
)
def test_what_a_pattern_matches(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected
    assert found(pattern, name) is expected


@pytest.mark.parametrize("pattern", ["", "/", "a//b", "events-*", "*a", "a/***", "__ds/x", "a\x00b", "x" * 1025])
def test_malformed_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidSubscription):
        compile_glob(pattern, MAX)


@pytest.mark.parametrize(
    "pattern",
    ["/ds/", "/ds/agents", "/ds/agents/a/b", "/ds/AGENTS/*", "/ds/agents/streams", "/ds/*/a/*", "/ds/agents//a"],
)
def test_patterns_that_no_stream_of_a_bucket_could_match_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidSubscription):
        compile_glob(pattern, MAX)


def test_a_pattern_has_a_bounded_number_of_segments() -> None:
    with pytest.raises(InvalidSubscription):
        compile_glob("/".join("a" * 129), MAX)


def test_a_pattern_has_a_bounded_number_of_double_asterisks() -> None:
    compile_glob("/".join(["**", "a"] * 8), MAX)
    with pytest.raises(InvalidSubscription, match=r"\*\* 9 times; use it at most 8 times"):
        compile_glob("/".join(["**", "a"] * 9), MAX)


@pytest.mark.parametrize(
    "rest", [["a", "*"] * 30, ["**", "a", "*"] * 20, ["*"] * 60], ids=["alternating", "many **", "only *"]
)
def test_the_worst_patterns_take_a_bounded_time(rest: list[str]) -> None:
    """A regression: 60 patterns of `**/a/*/…` and one name of 512 segments took 9.5 s."""
    index: GlobIndex[int] = GlobIndex()
    for number in range(300):
        index.add(Glob(("**", *("a*"[number >> bit & 1] for bit in range(10)), *rest, "z")), number)
    name = "/".join("a" * 512)
    assert index.match(name) == []
    assert least(lambda: cpu_s(lambda: index.match(name)), 0.2) < 0.2, "five times as many patterns, a 50th of the time"


def test_patterns_that_branch_at_every_segment_take_a_bounded_time() -> None:
    """1,024 different prefixes, all of which match, each followed by `**`."""
    index: GlobIndex[int] = GlobIndex()
    for number in range(1024):
        index.add(Glob((*("a*"[number >> bit & 1] for bit in range(10)), "**", "a", "b")), number)
    name = "/".join("a" * 512)
    assert index.match(name) == []
    assert least(lambda: cpu_s(lambda: index.match(name)), 0.2) < 0.2
    assert len(index.match(name + "/b")) == 1024


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
def test_removing_patterns_leaves_the_others(written: list[str], data: st.DataObject) -> None:
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


def test_a_full_automaton_is_followed_by_another_and_removal_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(globs, "GROUP_BITS_MAX", 8)
    index: GlobIndex[int] = GlobIndex()
    patterns = {number: compile_glob(f"**/x/*/n{number}", MAX) for number in range(20)}
    for number, glob in patterns.items():
        index.add(glob, number)
    assert [index.match(f"a/x/b/n{number}") for number in range(20)] == [[number] for number in range(20)]
    for number in range(0, 20, 2):
        index.discard(patterns[number], number)
    assert [index.match(f"a/x/b/n{number}") for number in range(20)] == [[n] if n % 2 else [] for n in range(20)]
    for number in range(0, 20, 2):
        index.add(patterns[number], number)
    assert [index.match(f"a/x/b/n{number}") for number in range(20)] == [[number] for number in range(20)]


def test_removing_a_missing_pattern_changes_nothing() -> None:
    index: GlobIndex[str] = GlobIndex()
    index.add(compile_glob("a/*", MAX), "kept")
    index.discard(compile_glob("a/b", MAX), "other")
    index.discard(compile_glob("a/*", MAX), "other")
    assert index.match("a/b") == ["kept"]


def test_name_is_not_compared_with_every_pattern() -> None:
    """With a thousand patterns of other prefixes, a lookup visits no more nodes than with one."""

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
