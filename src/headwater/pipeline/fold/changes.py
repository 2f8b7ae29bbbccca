"""Parse messages into state changes: the operations of session events and of the state protocol.

There are two forms. An entry remembers its form, so that a snapshot consists of messages that the readers of the stream
understand:

    {"type": "message", "key": "m1", "operation": "set", "value": …}                   a session event
    {"type": "user", "key": "u1", "value": …, "headers": {"operation": "insert"}}      a state protocol message

Invariant: values keep the bytes of their message. A number of forty digits keeps all of them.
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
    """Remove every entry."""


EFFECTS: Final[dict[str, Effect]] = {
    "set": Effect.PUT,
    "insert": Effect.PUT,
    "update": Effect.PUT,
    "upsert": Effect.PUT,
    "remove": Effect.REMOVE,
    "delete": Effect.REMOVE,
    "append": Effect.APPEND,
}
"""By operation, in either form. The last operation on a key wins; `insert` of an existing key replaces it."""

RESET: Final = "reset"
NULL: Final = b"null"

Key = tuple[str, str]
"""Type and key. A session event may omit the type, which is then empty."""


@dataclass(frozen=True, slots=True)
class StateChange:
    effect: Effect
    key: Key
    value: bytes
    session: bool
    """In the form of a session event, not of the state protocol."""
    unchanged: tuple[str, ...] = ()
    """Fields that the value omits because they did not change: large columns of a table."""


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
    """The change of a message; None if it is not a change, such as a number or another kind of event."""
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
