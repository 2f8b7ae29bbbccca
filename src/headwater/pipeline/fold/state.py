"""The state of one stream, and its encoding as a snapshot.

A snapshot is the shortest list of messages that produces the state: one per entry, sorted by type and key, as a JSON
array. A client that can apply messages can apply a snapshot; decoding a snapshot is folding its messages.
Invariant: equal states have equal bytes, and `FoldState.decoded(state.encoded()) == state`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from headwater.pipeline.fold.appending import appended, completed
from headwater.pipeline.fold.changes import Effect, Key, StateChange, change_of

CONTENT_TYPE = "application/json"

_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode


class SnapshotFormatError(Exception):
    """The snapshot has another format, because another client published it."""


@dataclass(slots=True)
class StateEntry:
    """The value of a key, and the chunks that have not been appended to it yet."""

    _value: bytes | None
    session: bool
    _chunks: list[bytes] = field(default_factory=list)

    @property
    def value(self) -> bytes:
        if self._chunks:
            self._value = appended(self._value, self._chunks)
            self._chunks = []
        assert self._value is not None
        return self._value

    def append(self, chunk: bytes) -> None:
        self._chunks.append(chunk)


class FoldState:
    """The state after a stream's messages; `apply` them in order."""

    __slots__ = ("entries", "ignored", "touched", "was_reset")

    def __init__(self) -> None:
        self.entries: dict[Key, StateEntry] = {}
        self.ignored = 0
        """How many messages are not changes."""
        self.touched: set[Key] = set()
        """Keys that changed since the last reset."""
        self.was_reset = False

    def __len__(self) -> int:
        return len(self.entries)

    def apply(self, message: bytes) -> None:
        change = change_of(message)
        if change is None:
            self.ignored += 1
        else:
            self.change(change)

    def apply_all(self, messages: Iterable[bytes]) -> FoldState:
        for message in messages:
            self.apply(message)
        return self

    def change(self, change: StateChange) -> None:
        key = change.key
        match change.effect:
            case Effect.PUT:
                before = self.entries.get(key) if change.unchanged else None
                value = change.value if before is None else completed(change.value, before.value, change.unchanged)
                self.entries[key] = StateEntry(value, change.session)
            case Effect.REMOVE:
                self.entries.pop(key, None)
            case Effect.APPEND:
                if key in self.entries:
                    self.entries[key].append(change.value)
                else:
                    self.entries[key] = StateEntry(change.value, change.session)
            case Effect.RESET:
                self.entries.clear()
                self.touched.clear()
                self.was_reset = True
                return
        self.touched.add(key)

    def encoded(self) -> bytes:
        """The state as a snapshot."""
        return b"[" + b",".join(_message_of(key, self.entries[key]) for key in sorted(self.entries)) + b"]"

    @classmethod
    def decoded(cls, snapshot: bytes) -> FoldState:
        """Decode a snapshot."""
        state = cls()
        try:
            messages = _elements(snapshot)
        except msgspec.MsgspecError as error:
            raise SnapshotFormatError(f"it is not a JSON array of messages ({error})") from None
        state.apply_all(bytes(message) for message in messages)
        if state.ignored:
            raise SnapshotFormatError(f"{state.ignored} of its {len(messages)} elements are not changes")
        state.touched.clear()
        return state


def _message_of(key: Key, entry: StateEntry) -> bytes:
    """The message that creates this entry."""
    kind, name = key
    head = b'{"type":%b,"key":%b' % (_text(kind), _text(name)) if kind else b'{"key":%b' % _text(name)
    if entry.session:
        return b'%b,"operation":"set","value":%b}' % (head, entry.value)
    return b'%b,"value":%b,"headers":{"operation":"insert"}}' % (head, entry.value)
