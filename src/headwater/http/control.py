"""The addresses below `/v1/stream/__ds/`, routed before stream names so that no stream can stand in their way.

A stream that is named in an address may be one segment with its slashes encoded, or several; nowhere else is an
encoded slash a slash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

from headwater.core.errors import InvalidSubscription, SubscriptionNotFound
from headwater.core.names import RESERVED_SEGMENT
from headwater.core.subscriptions import check_subscription_id
from headwater.http import jwks, options, subscriptions, workers

if TYPE_CHECKING:
    from headwater.http.app import Handler

_ROOT: Final = RESERVED_SEGMENT.encode()
_SUBSCRIPTIONS: Final = b"subscriptions"
_STREAMS: Final = b"streams"

_KEYS: Final[Mapping[bytes, Handler]] = {
    b"GET": jwks.handle,
    b"HEAD": jwks.handle,
    b"OPTIONS": options.handle,
}
_SUBSCRIPTION: Final[Mapping[bytes, Handler]] = {
    b"PUT": subscriptions.put,
    b"GET": subscriptions.get,
    b"HEAD": subscriptions.get,
    b"DELETE": subscriptions.delete,
    b"OPTIONS": options.handle,
}
_INDEX: Final[Mapping[bytes, Handler]] = {
    b"GET": subscriptions.index,
    b"HEAD": subscriptions.index,
    b"OPTIONS": options.handle,
}
_LINK: Final[Mapping[bytes, Handler]] = {b"DELETE": subscriptions.remove_stream, b"OPTIONS": options.handle}
_ACTIONS: Final[Mapping[bytes, Mapping[bytes, Handler]]] = {
    name: {b"POST": handler, b"OPTIONS": options.handle}
    for name, handler in (
        (_STREAMS, subscriptions.add_streams),
        (b"claim", workers.claim),
        (b"ack", workers.ack),
        (b"release", workers.release),
        (b"callback", workers.call_back),
    )
}


def is_control(path: bytes) -> bool:
    """Whether a path below the stream root belongs to this API. Encoded spellings of it are refused as names."""
    return path == _ROOT or path.startswith(_ROOT + b"/")


def resolve(path: bytes) -> tuple[Mapping[bytes, Handler], str, str]:
    """The handlers of an address, the subscription that it names, and the stream below that."""
    segments = path.split(b"/")[1:]
    if segments == [b"jwks.json"]:
        return _KEYS, "", ""
    if segments == [_SUBSCRIPTIONS]:
        return _INDEX, "", ""
    if len(segments) >= 2 and segments[0] == _SUBSCRIPTIONS:
        id_ = check_subscription_id(_decoded(segments[1]))
        rest = segments[2:]
        if not rest:
            return _SUBSCRIPTION, id_, ""
        if len(rest) == 1 and rest[0] in _ACTIONS:
            return _ACTIONS[rest[0]], id_, ""
        if rest[0] == _STREAMS:
            return _LINK, id_, _decoded(b"/".join(rest[1:]))
    raise SubscriptionNotFound("There is nothing at this address below __ds/.")


def _decoded(raw: bytes) -> str:
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidSubscription("The address must be valid UTF-8.") from None
