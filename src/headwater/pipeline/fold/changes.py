"""What a message does to a state: the operations of sessions and of the state protocol, read without touching values.

Two spellings are known, and told apart for as long as an entry lives, so that a state can be written down as messages
that its own readers understand:

    {"type": "message", "key": "m1", "operation": "set", "value": …}                   a session's event
    {"type": "user", "key": "u1", "value": …, "headers": {"operation": "insert"}}      the state protocol's

Invariant: values are kept as the bytes they came in. A number of forty digits stays one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec


class Effect(Enum):
    PUT = "put"
    REMOVE = "remove"
    APPEND = "append"
    RESET = "reset"
    """Everything before it is void."""


EFFECTS: Final[dict[str, Effect]] = {
    "set": Effect.PUT,
    "insert": Effect.PUT,
    "update": Effect.PUT,
    "upsert": Effect.PUT,
    "remove": Effect.REMOVE,
    "delete": Effect.REMOVE,
    "append": Effect.APPEND,
}
"""By operation, in either spelling. The last one on a key wins; `insert` of a key that is there replaces it."""

RESET: Final = "reset"
NULL: Final = b"null"

Key = tuple[str, str]
"""Type and key. A session's event may leave the type out; then it is empty."""


@dataclass(frozen=True, slots=True)
class StateChange:
    effect: Effect
    key: Key
    value: bytes
    session: bool
    """Spelled as a session's event, not as the state protocol's."""
    unchanged: tuple[str, ...] = ()
    """Fields that the value leaves out because they keep what they were: large columns of a table."""


class _StateHeaders(msgspec.Struct):
    operation: str | None = None
    control: str | None = None
    unchanged: msgspec.Raw = msgspec.Raw(b"")


class _StateMessage(msgspec.Struct):
    key: str | None = None
    type: str = ""
    operation: str | None = None
    value: msgspec.Raw = msgspec.Raw(b"null")
    headers: _StateHeaders | None = None


_decode = msgspec.json.Decoder(_StateMessage).decode
_names = msgspec.json.Decoder(tuple[str, ...]).decode


def change_of(message: bytes) -> StateChange | None:
    """What a message does; None for one that is no change, such as a bare number or another kind of event."""
    try:
        event = _decode(message)
    except (msgspec.MsgspecError, RecursionError):
        return None
    headers = event.headers
    if headers is not None and headers.control == RESET:
        return StateChange(Effect.RESET, ("", ""), NULL, session=False)
    in_headers = headers.operation if headers is not None else None
    effect = EFFECTS.get(in_headers or event.operation or "")
    if effect is None or event.key is None:
        return None
    unchanged = _unchanged(headers.unchanged) if headers is not None and effect is Effect.PUT else ()
    return StateChange(effect, (event.type, event.key), bytes(event.value), in_headers is None, unchanged)


def _unchanged(names: msgspec.Raw) -> tuple[str, ...]:
    if not names:
        return ()
    try:
        return _names(names)
    except msgspec.MsgspecError:
        return ()  # Another application's header of the same name.
