"""The compiled path of plain appends, if this build has it (see `core/native/plain_append`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from headwater.core import native
from headwater.http.connection import Connection
from headwater.http.connection_input import ConnectionInput
from headwater.http.context import Context
from headwater.http.flow import POSTPONED_BYTES, Turns
from headwater.http.head_cache import HeadGeneration, KnownHead
from headwater.http.headers import NO_CONTENT
from headwater.http.parser import RequestParser
from headwater.http.responses import Repeat
from headwater.http.states import ANSWERED, TAKEN

AppendKnown: TypeAlias = Callable[[Connection, bytes], bool]
"""Processes received data, or returns False and has changed nothing."""

_CLASSES: Final = (Connection, ConnectionInput, RequestParser, Turns, KnownHead, HeadGeneration, Repeat)


def compiled_appends(context: Context, connection_types: Sequence[type[Connection]]) -> AppendKnown | None:
    """The path for connections of exactly these types; None in a build without it."""
    if native.PlainAppendPath is None:
        return None
    classes, used = context.engine.plain_appends.used()
    found: AppendKnown = native.PlainAppendPath(
        classes | {each.__name__: each for each in _CLASSES},
        used
        | {
            "context": context,
            "request_log": context.request_log,
            "turns": context.turns,
            "connection_types": connection_types,
            "idle": ANSWERED,
            "serving": TAKEN,
            "no_content": NO_CONTENT,
            "max_request_bytes": POSTPONED_BYTES,
        },
    ).append
    return found
