"""Globs over stream names: which patterns a name matches.

`*` matches exactly one segment of a name and `**` any number of segments, including none; every other segment
matches itself (`%2A` is a literal asterisk). `GlobIndex` holds many patterns and bounds the work per name:

- The segments before the first `**` of all patterns form one tree. Each of its nodes is visited at most once per name,
  and patterns that begin differently are never examined.
- The segments after the first `**` form automata whose states are the bits of an integer (the Shift-And method). One
  step handles all states of up to `GROUP_BITS_MAX` pattern segments at once, for any patterns.
"""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

from headwater.core.buckets import BUCKET_ROOT, check_bucket_id, check_stream_id
from headwater.core.errors import InvalidName
from headwater.core.names import RESERVED_SEGMENT
from headwater.core.subscription_errors import InvalidSubscription

ONE: Final = "*"
ANY: Final = "**"
SEGMENTS_MAX: Final = 128
"""Segments of one pattern."""
ANY_MAX: Final = 8
"""`**` in one pattern. More would be a mistake; the time to match does not depend on it."""
GROUP_BITS_MAX: Final = 2_048
"""States in one automaton: bounds what removing a pattern rebuilds, and what each distinct segment keeps in memory."""

_ASTERISK: Final = re.compile("%2a", re.IGNORECASE)

ValueT = TypeVar("ValueT")


class Glob:
    """A checked pattern. Equal patterns have equal `text`."""

    __slots__ = ("segments", "text")

    def __init__(self, segments: tuple[str, ...]) -> None:
        self.segments: Final = segments
        self.text: Final = "/".join(segments)


def compile_glob(pattern: str, max_bytes: int) -> Glob:
    """Check a client's pattern. Slashes around it are ignored, but `/ds/` at the beginning means streams of buckets."""
    if pattern.startswith(BUCKET_ROOT):
        glob = compile_glob(pattern.removeprefix(BUCKET_ROOT), max_bytes)
        return Glob((*BUCKET_ROOT[:-1].split("/"), *_check_bucket_pattern(glob.segments)))
    stripped = pattern.strip("/")
    if not stripped:
        raise InvalidSubscription("pattern is empty; use one such as orders/* or **.")
    if len(stripped.encode("utf-8", "surrogatepass")) > max_bytes:
        raise InvalidSubscription(f"pattern is longer than {max_bytes} bytes (limits.max_name_bytes); shorten it.")
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in stripped):
        raise InvalidSubscription(f"pattern {stripped!r} may not contain control characters; remove them.")
    segments: list[str] = []
    for segment in stripped.split("/"):
        if not segment:
            raise InvalidSubscription(
                f"pattern {pattern!r} may not contain empty segments; use one slash between two segments."
            )
        if "*" in segment and segment not in (ONE, ANY):
            # It could only match a name that contains an asterisk, which is probably not intended.
            raise InvalidSubscription(
                f"In a pattern, * and ** are whole segments, and {segment!r} is neither; write a literal asterisk as"
                " %2A."
            )
        if segment == ANY and segments and segments[-1] == ANY:
            continue  # Two in a row match the same as one.
        segments.append(segment)
    if len(segments) > SEGMENTS_MAX:
        raise InvalidSubscription(f"pattern has {len(segments)} segments; use at most {SEGMENTS_MAX}.")
    if segments.count(ANY) > ANY_MAX:
        raise InvalidSubscription(f"pattern has ** {segments.count(ANY)} times; use it at most {ANY_MAX} times.")
    if segments[0] == RESERVED_SEGMENT:
        raise InvalidSubscription(
            f"Names below {RESERVED_SEGMENT}/ are reserved, and no stream has one; use another pattern."
        )
    return Glob(tuple(segments))


def _check_bucket_pattern(segments: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a pattern that cannot match any `{bucket_id}/{stream_id}`."""
    single = [segment for segment in segments if segment != ANY]
    if len(single) > 2 or (len(single) < 2 and ANY not in segments):
        raise InvalidSubscription(
            f"The pattern matches no stream of a bucket; write it like {BUCKET_ROOT}{{bucket}}/{{stream}}, with * or"
            " **."
        )
    try:
        if segments[0] not in (ONE, ANY):
            check_bucket_id(_literal(segments[0]))
        if len(single) == 2 and single[1] != ONE:
            check_stream_id("", _literal(single[1]))
    except InvalidName as refusal:
        raise InvalidSubscription(refusal.detail) from None
    return segments


class _Suffix(Generic[ValueT]):
    """The part of a pattern after its first `**`, and the values of the patterns that continue with it."""

    __slots__ = ("accept", "group", "node", "segments", "start", "values")

    def __init__(self, node: _Node[ValueT], segments: tuple[str, ...]) -> None:
        self.node: Final = node
        self.segments: Final = segments
        self.values: dict[ValueT, None] = {}
        self.group: _Group[ValueT] | None = None
        self.start = 0
        """The bit of its first state."""
        self.accept = 0
        """The bit of its last state, which is active after a name that matches."""

    @property
    def size(self) -> int:
        return sum(segment != ANY for segment in self.segments) + 1


class _Group(Generic[ValueT]):
    """An automaton for several suffixes. A state waits for one segment of its suffix; the last state matched them all.

    Reading a segment moves every active state that accepts it to the next state. An active state after a `**` also
    stays active.
    """

    __slots__ = ("accepts", "literals", "loops", "ones", "size", "suffixes")

    def __init__(self) -> None:
        self.suffixes: dict[int, _Suffix[ValueT]] = {}
        """By the number of the accepting bit."""
        self._clear()

    def _clear(self) -> None:
        self.suffixes.clear()
        self.size = 0
        self.accepts = 0
        self.loops = 0
        """States that a `**` precedes."""
        self.ones = 0
        """States that wait for any one segment."""
        self.literals: dict[str, int] = {}
        """States that wait for a given segment."""

    def add(self, suffix: _Suffix[ValueT]) -> None:
        state = 1 << self.size
        suffix.start = state
        self.loops |= state  # The `**` before the suffix.
        for segment in suffix.segments:
            if segment == ANY:
                self.loops |= state
                continue
            if segment == ONE:
                self.ones |= state
            else:
                literal = _literal(segment)
                self.literals[literal] = self.literals.get(literal, 0) | state
            state <<= 1
        suffix.accept = state
        self.accepts |= state
        self.size = state.bit_length()
        self.suffixes[self.size] = suffix
        suffix.group = self
        suffix.node.starts = None

    def discard(self, suffix: _Suffix[ValueT]) -> None:
        """Remove a suffix and renumber the states of the others, so that no state is wasted."""
        others = [other for other in self.suffixes.values() if other is not suffix]
        self._clear()
        for other in others:
            self.add(other)
        suffix.node.starts = None

    def step(self, active: int, segment: str) -> int:
        return (active & self.loops) | ((active & (self.ones | self.literals.get(segment, 0))) << 1)

    def accepted(self, active: int) -> list[_Suffix[ValueT]]:
        found: list[_Suffix[ValueT]] = []
        hits = active & self.accepts
        while hits:
            lowest = hits & -hits
            found.append(self.suffixes[lowest.bit_length()])
            hits ^= lowest
        return found


class _Node(Generic[ValueT]):
    """A prefix of patterns, without `**`. `values` are those of the patterns that end here."""

    __slots__ = ("any_values", "literals", "one_node", "starts", "suffixes", "values")

    def __init__(self) -> None:
        self.literals: dict[str, _Node[ValueT]] = {}
        self.one_node: _Node[ValueT] | None = None
        self.values: dict[ValueT, None] = {}
        self.any_values: dict[ValueT, None] = {}
        """The values of the patterns that end with a `**` here: they match any continuation of the name."""
        self.suffixes: dict[tuple[str, ...], _Suffix[ValueT]] = {}
        """The continuations of the patterns whose first `**` is here."""
        self.starts: dict[_Group[ValueT], int] | None = None
        """The first states of `suffixes`, per automaton; None until they are needed."""

    @property
    def is_empty(self) -> bool:
        return not (self.values or self.any_values or self.literals or self.one_node or self.suffixes)

    def first_states(self) -> dict[_Group[ValueT], int]:
        if self.starts is None:
            self.starts = {}
            for suffix in self.suffixes.values():
                assert suffix.group is not None, "every suffix has a group"
                self.starts[suffix.group] = self.starts.get(suffix.group, 0) | suffix.start
        return self.starts


class GlobIndex(Generic[ValueT]):
    """Many globs, each with a value; finds the values of all globs that a name matches."""

    def __init__(self) -> None:
        self._root: _Node[ValueT] = _Node()
        self._groups: dict[_Group[ValueT], None] = {}
        """Automata that are not full."""

    @property
    def is_empty(self) -> bool:
        return self._root.is_empty

    def add(self, glob: Glob, value: ValueT) -> None:
        prefix, rest = _split(glob)
        node = self._root
        for segment in prefix:
            node = _step(node, segment)
        if not rest:
            (node.values if rest is None else node.any_values)[value] = None
            return
        suffix = node.suffixes.get(rest)
        if suffix is None:
            suffix = node.suffixes[rest] = _Suffix(node, rest)
            self._place(suffix)
        suffix.values[value] = None

    def discard(self, glob: Glob, value: ValueT) -> None:
        """Remove a value, and the branches that only it needed."""
        prefix, rest = _split(glob)
        path = [self._root]
        for segment in prefix:
            following = _follow(path[-1], segment)
            if following is None:
                return
            path.append(following)
        node = path[-1]
        if not rest:
            (node.values if rest is None else node.any_values).pop(value, None)
        elif rest in node.suffixes:
            suffix = node.suffixes[rest]
            suffix.values.pop(value, None)
            if not suffix.values:
                del node.suffixes[rest]
                self._remove(suffix)
        for parent, segment, child in zip(path[-2::-1], prefix[::-1], path[:0:-1], strict=True):
            if not child.is_empty:
                return
            _prune(parent, segment)

    def match(self, name: str) -> list[ValueT]:
        """The values whose glob matches the name, each once."""
        found: dict[ValueT, None] = {}
        nodes = [self._root]
        active: dict[_Group[ValueT], int] = {}
        for segment in name.split("/"):
            following: list[_Node[ValueT]] = []
            for node in nodes:
                if node.any_values:
                    found.update(node.any_values)
                if node.suffixes:
                    for group, states in node.first_states().items():
                        active[group] = active.get(group, 0) | states
                if node.literals:
                    literal = node.literals.get(segment)
                    if literal is not None:
                        following.append(literal)
                if node.one_node is not None:
                    following.append(node.one_node)
            if active:
                active = {group: left for group, states in active.items() if (left := group.step(states, segment))}
            elif not following:
                return list(found)
            nodes = following
        for node in nodes:
            found.update(node.values)
            found.update(node.any_values)
        for group, states in active.items():
            for suffix in group.accepted(states):
                found.update(suffix.values)
        return list(found)

    def _place(self, suffix: _Suffix[ValueT]) -> None:
        group = next(iter(self._groups), None)
        if group is None or group.size + suffix.size > GROUP_BITS_MAX:
            if group is not None:
                # It has no room for this suffix, and probably none for others: do not try it again.
                del self._groups[group]
            group = _Group()
            self._groups[group] = None
        group.add(suffix)

    def _remove(self, suffix: _Suffix[ValueT]) -> None:
        group = suffix.group
        assert group is not None, "every suffix has a group"
        group.discard(suffix)
        if group.size:
            self._groups[group] = None
        else:
            self._groups.pop(group, None)


def _split(glob: Glob) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """The segments before the first `**` and those after it; None for a glob without one."""
    if ANY not in glob.segments:
        return glob.segments, None
    first = glob.segments.index(ANY)
    return glob.segments[:first], glob.segments[first + 1 :]


def _step(node: _Node[ValueT], segment: str) -> _Node[ValueT]:
    following = _follow(node, segment)
    if following is not None:
        return following
    following = _Node()
    if segment == ONE:
        node.one_node = following
    else:
        node.literals[_literal(segment)] = following
    return following


def _follow(node: _Node[ValueT], segment: str) -> _Node[ValueT] | None:
    return node.one_node if segment == ONE else node.literals.get(_literal(segment))


def _prune(parent: _Node[ValueT], segment: str) -> None:
    if segment == ONE:
        parent.one_node = None
    else:
        del parent.literals[_literal(segment)]


def _literal(segment: str) -> str:
    return _ASTERISK.sub("*", segment)
