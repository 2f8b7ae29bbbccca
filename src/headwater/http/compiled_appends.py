"""The compiled path of plain appends, if this build has it (see `core/native/plain_append`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

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

log = logging.getLogger("headwater.http")

_CLASSES: Final = (Connection, ConnectionInput, RequestParser, Turns, KnownHead, HeadGeneration, Repeat)


def use_compiled_appends(context: Context, connection_types: Sequence[type[Connection]]) -> None:
    """Use the path, if this build has it, for connections of exactly these types, and for relayed requests."""
    if native.PlainAppendPath is None:
        return
    classes, used = context.engine.plain_appends.used()
    used |= {
        "context": context,
        "request_log": context.request_log,
        "turns": context.turns,
        "connection_types": connection_types,
        "idle": ANSWERED,
        "serving": TAKEN,
        "no_content": NO_CONTENT,
        "max_request_bytes": POSTPONED_BYTES,
    }
    try:
        path = native.PlainAppendPath(classes | {each.__name__: each for each in _CLASSES}, used)
    except TypeError as error:
        # Another version of msgspec or Python may store attributes in another way.
        log.warning("appends take more CPU time than they could, because the compiled path cannot be used: %s", error)
        return
    context.append_known, context.response_to_known = path.append, path.response_to


def use_no_compiled_appends(context: Context) -> None:
    context.append_known = context.response_to_known = None
