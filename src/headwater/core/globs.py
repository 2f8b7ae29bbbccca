"""Globs over stream names: which patterns a name matches.

`*` stands for exactly one segment of a name and `**` for any number of them, none included; every other segment
stands for itself (`%2A` spells a segment's own asterisk). `GlobIndex` holds many patterns in one tree, so that a name
is matched by walking its segments once: what it costs grows with the name, not with the number of patterns.
"""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

from headwater.core.errors import InvalidSubscription
from headwater.core.names import RESERVED_SEGMENT

ONE: Final = "*"
ANY: Final = "**"
SEGMENTS_MAX: Final = 128

_ASTERISK: Final = re.compile("%2a", re.IGNORECASE)

ValueT = TypeVar("ValueT")


class Glob:
    """A checked pattern. Equal patterns have equal `text`."""

    __slots__ = ("segments", "text")

    def __init__(self, segments: tuple[str, ...]) -> None:
        self.segments: Final = segments
        self.text: Final = "/".join(segments)


def compile_glob(pattern: str, max_bytes: int) -> Glob:
    """The glob that a client wrote; slashes around it do not count."""
    stripped = pattern.strip("/")
    if not stripped:
        raise InvalidSubscription("pattern is empty.")
    if len(stripped.encode("utf-8", "surrogatepass")) > max_bytes:
        raise InvalidSubscription(f"pattern is longer than {max_bytes} bytes.")
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in stripped):
        raise InvalidSubscription("pattern may not contain control characters.")
    segments: list[str] = []
    for segment in stripped.split("/"):
        if not segment:
            raise InvalidSubscription("pattern may not contain empty segments.")
        if "*" in segment and segment not in (ONE, ANY):
            # It could only match a name with an asterisk in it, which is hardly what was meant.
            raise InvalidSubscription("In a pattern, * and ** are whole segments; write an asterisk itself as %2A.")
        if segment == ANY and segments and segments[-1] == ANY:
            continue  # Two in a row match what one does.
        segments.append(segment)
    if len(segments) > SEGMENTS_MAX:
        raise InvalidSubscription(f"pattern has more than {SEGMENTS_MAX} segments.")
    if segments[0] == RESERVED_SEGMENT:
        raise InvalidSubscription(f"Names below {RESERVED_SEGMENT}/ are reserved; no stream has one.")
    return Glob(tuple(segments))


class _Node(Generic[ValueT]):
    """What can follow a beginning of patterns. `values` are those of the patterns that end here."""

    __slots__ = ("any_node", "literals", "one_node", "repeats", "values")

    def __init__(self, *, repeats: bool = False) -> None:
        self.literals: dict[str, _Node[ValueT]] = {}
        self.one_node: _Node[ValueT] | None = None
        self.any_node: _Node[ValueT] | None = None
        self.repeats: Final = repeats
        """Reached by `**`: takes any further segment and stays."""
        self.values: dict[ValueT, None] = {}

    @property
    def is_empty(self) -> bool:
        return not (self.values or self.literals or self.one_node or self.any_node)


class GlobIndex(Generic[ValueT]):
    """Many globs, each with a value; finds the values of all globs that a name matches."""

    def __init__(self) -> None:
        self._root: _Node[ValueT] = _Node()

    @property
    def is_empty(self) -> bool:
        return self._root.is_empty

    def add(self, glob: Glob, value: ValueT) -> None:
        node = self._root
        for segment in glob.segments:
            node = _step(node, segment)
        node.values[value] = None

    def discard(self, glob: Glob, value: ValueT) -> None:
        """Take a value out again, with the branches that only it needed."""
        path = [self._root]
        for segment in glob.segments:
            following = _follow(path[-1], segment)
            if following is None:
                return
            path.append(following)
        path[-1].values.pop(value, None)
        for parent, segment, node in zip(path[-2::-1], glob.segments[::-1], path[:0:-1], strict=True):
            if not node.is_empty:
                return
            _prune(parent, segment)

    def match(self, name: str) -> list[ValueT]:
        """The values whose glob matches the name, each once."""
        # All beginnings of patterns that fit so far, each once: a node has one way to it, but for those of `**`, which
        # are looked for. Written out rather than short: every new stream comes by here.
        states = [self._root] if self._root.any_node is None else [self._root, self._root.any_node]
        for segment in name.split("/"):
            following: list[_Node[ValueT]] = []
            for node in states:
                if node.repeats and node not in following:
                    following.append(node)
                if node.literals:
                    literal = node.literals.get(segment)
                    if literal is not None:
                        following.append(literal)
                        if literal.any_node is not None and literal.any_node not in following:
                            following.append(literal.any_node)
                one = node.one_node
                if one is not None:
                    following.append(one)
                    if one.any_node is not None and one.any_node not in following:
                        following.append(one.any_node)
            if not following:
                return []
            states = following
        if len(states) == 1:
            return list(states[0].values)
        return list(dict.fromkeys(value for node in states for value in node.values))


def _step(node: _Node[ValueT], segment: str) -> _Node[ValueT]:
    following = _follow(node, segment)
    if following is not None:
        return following
    if segment == ANY:
        node.any_node = following = _Node(repeats=True)
    elif segment == ONE:
        node.one_node = following = _Node()
    else:
        node.literals[_literal(segment)] = following = _Node()
    return following


def _follow(node: _Node[ValueT], segment: str) -> _Node[ValueT] | None:
    if segment == ANY:
        return node.any_node
    if segment == ONE:
        return node.one_node
    return node.literals.get(_literal(segment))


def _prune(parent: _Node[ValueT], segment: str) -> None:
    if segment == ANY:
        parent.any_node = None
    elif segment == ONE:
        parent.one_node = None
    else:
        del parent.literals[_literal(segment)]


def _literal(segment: str) -> str:
    return _ASTERISK.sub("*", segment)
