"""Parse URL paths. Every segment is percent-decoded once, then checked.

    /v1/stream/{name}                                a stream; its name may have several segments
    /v1/stream/__ds/streams                          the listing of streams, and of those that changed
    /v1/stream/__ds/follow[/{id}]                    one event stream over many streams
    /v1/stream/__ds/cluster                          the state of the cluster, of a node
    /v1/stream/__ds/jwks.json                        the public keys of webhooks
    /v1/stream/__ds/subscriptions                    the list of subscriptions
    /v1/stream/__ds/subscriptions/{id}               a subscription
    /v1/stream/__ds/subscriptions/{id}/{action}      actions of workers: claim, ack, release, callback
    /v1/stream/__ds/subscriptions/{id}/streams[/…]   its explicit links
    /ds                                              the list of buckets
    /ds/{bucket_id}                                  a bucket
    /ds/{bucket_id}/streams                          the listing of its streams
    /ds/{bucket_id}/{stream_id}                      a stream, with every operation of the base protocol
    /ds/{bucket_id}/{stream_id}/snapshot             its latest snapshot
    /ds/{bucket_id}/{stream_id}/snapshot/{offset}    the snapshot at an offset
    /ds/{bucket_id}/{stream_id}/bootstrap            snapshot and updates in one response
    /healthz, /readyz, /metrics, /ui/…               pages for operators, and the stream browser

`__ds` is routed before stream names, so that no stream can have its name. Other roots (`server.roots`) are replaced by
`/v1/stream/` before anything else is checked, so no rule depends on the root that a client used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from headwater.core.buckets import BUCKET_ROOT, LISTING_ID, check_bucket_id, check_stream_id, stream_name
from headwater.core.errors import BadRequest, InvalidName, NotFound
from headwater.core.names import RESERVED_SEGMENT, canonical_name, decode_segment
from headwater.core.subscription_errors import InvalidSubscription, SubscriptionNotFound
from headwater.core.subscriptions import check_subscription_id

STREAM_ROOT: Final = b"/v1/stream/"
BUCKETS_ROOT: Final = BUCKET_ROOT.encode()

# Patterns: the keys of the route table.
SERVER: Final = "*"
STREAM: Final = "/v1/stream/{name}"
STREAM_LISTING: Final = "/v1/stream/__ds/streams"
FOLLOW: Final = "/v1/stream/__ds/follow"
FOLLOW_EVENTS: Final = "/v1/stream/__ds/follow/{id}"
CLUSTER: Final = "/v1/stream/__ds/cluster"
KEY_SET: Final = "/v1/stream/__ds/jwks.json"
SUBSCRIPTIONS: Final = "/v1/stream/__ds/subscriptions"
SUBSCRIPTION: Final = "/v1/stream/__ds/subscriptions/{id}"
SUBSCRIPTION_STREAMS: Final = "/v1/stream/__ds/subscriptions/{id}/streams"
SUBSCRIPTION_STREAM: Final = "/v1/stream/__ds/subscriptions/{id}/streams/{name}"
CLAIM: Final = "/v1/stream/__ds/subscriptions/{id}/claim"
ACK: Final = "/v1/stream/__ds/subscriptions/{id}/ack"
RELEASE: Final = "/v1/stream/__ds/subscriptions/{id}/release"
CALLBACK: Final = "/v1/stream/__ds/subscriptions/{id}/callback"
BUCKETS: Final = "/ds"
BUCKET: Final = "/ds/{bucket}"
BUCKET_LISTING: Final = "/ds/{bucket}/streams"
BUCKET_STREAM: Final = "/ds/{bucket}/{stream}"
LATEST_SNAPSHOT: Final = "/ds/{bucket}/{stream}/snapshot"
SNAPSHOT: Final = "/ds/{bucket}/{stream}/snapshot/{offset}"
BOOTSTRAP: Final = "/ds/{bucket}/{stream}/bootstrap"
HEALTH: Final = "/healthz"
READY: Final = "/readyz"
METRICS: Final = "/metrics"
UI: Final = "/ui/{file}"

_CONTROL: Final = RESERVED_SEGMENT.encode()
_PAGES: Final = {pattern.encode(): pattern for pattern in (HEALTH, READY, METRICS, BUCKETS)}
_SUBSCRIPTION_ACTIONS: Final = {
    b"streams": SUBSCRIPTION_STREAMS,
    b"claim": CLAIM,
    b"ack": ACK,
    b"release": RELEASE,
    b"callback": CALLBACK,
}
_NO_QUERY: Final[Mapping[str, str]] = {}


class Address(NamedTuple):
    """The target of a request: the pattern of its path, and the values in it."""

    pattern: str
    name: str = ""
    """The canonical name of the stream; for the stream browser, the path of the file."""
    query: Mapping[str, str] = _NO_QUERY
    bucket: str = ""
    """The bucket in the path, or of the stream."""
    snapshot: str = ""
    """The offset of the snapshot in the path."""
    subscription: str = ""
    """The id of the subscription, or of the follower of many streams, in the path."""

    def with_query(self, query: Mapping[str, str]) -> Address:
        return Address(self.pattern, self.name, query, self.bucket, self.snapshot, self.subscription)


def canonical_path(path: bytes, aliases: Sequence[bytes]) -> bytes:
    """The same path below `/v1/stream/`, if it is below one of the other roots."""
    for alias in aliases:
        if path.startswith(alias) and path[len(alias) : len(alias) + 1] == b"/":
            return STREAM_ROOT + path[len(alias) + 1 :]
    return path


def resolve_path(path: bytes, max_name_bytes: int, aliases: Sequence[bytes] = ()) -> Address:
    """Parse a path. Raises the refusal if it matches no pattern."""
    path = canonical_path(path, aliases) if aliases else path
    if path.startswith(STREAM_ROOT):
        below = path[len(STREAM_ROOT) :]
        if below == _CONTROL or below.startswith(_CONTROL + b"/"):
            return _resolve_control(below)
        return Address(STREAM, canonical_name(below, max_name_bytes))
    if path.startswith(BUCKETS_ROOT):
        return _resolve_bucketed(path)
    if path in _PAGES:
        return Address(_PAGES[path])
    if path in {b"/", b"/ui"} or path.startswith(b"/ui/"):
        return Address(UI, path.decode("latin-1"))
    raise NotFound("There is no resource at this path. Streams are at /v1/stream/{name} and /ds/{bucket}/{stream}.")


def stream_at(path: bytes, max_name_bytes: int, aliases: Sequence[bytes] = ()) -> str:
    """The canonical name of a stream from its path in a header or a body."""
    path = canonical_path(path, aliases)
    if path.startswith(BUCKETS_ROOT):
        address = _resolve_bucketed(path)
        if address.pattern is not BUCKET_STREAM:
            raise InvalidName(f"{path.decode('latin-1')!r} does not name a stream; use /ds/{{bucket}}/{{stream}}.")
        return address.name
    if not path.startswith(STREAM_ROOT):
        raise BadRequest(
            f"The path of a stream must begin with {STREAM_ROOT.decode()} or /ds/, not {path.decode('latin-1')!r}."
        )
    return canonical_name(path[len(STREAM_ROOT) :], max_name_bytes)


def _resolve_control(path: bytes) -> Address:
    """Parse a path below `__ds`. A stream in it may be one segment with encoded slashes, or several segments."""
    segments = path.split(b"/")[1:]
    if segments == [b"streams"]:
        return Address(STREAM_LISTING)
    if segments == [b"follow"]:
        return Address(FOLLOW)
    if len(segments) == 2 and segments[0] == b"follow":
        return Address(FOLLOW_EVENTS, subscription=_decoded(segments[1]))
    if segments == [b"cluster"]:
        return Address(CLUSTER)
    if segments == [b"jwks.json"]:
        return Address(KEY_SET)
    if segments == [b"subscriptions"]:
        return Address(SUBSCRIPTIONS)
    if len(segments) >= 2 and segments[0] == b"subscriptions":
        id_ = check_subscription_id(_decoded(segments[1]))
        rest = segments[2:]
        if not rest:
            return Address(SUBSCRIPTION, subscription=id_)
        if len(rest) == 1 and rest[0] in _SUBSCRIPTION_ACTIONS:
            return Address(_SUBSCRIPTION_ACTIONS[rest[0]], subscription=id_)
        if rest[0] == b"streams":
            return Address(SUBSCRIPTION_STREAM, _decoded(b"/".join(rest[1:])), subscription=id_)
    raise SubscriptionNotFound("There is no resource at this path below __ds/; docs/api.md lists them.")


def _resolve_bucketed(path: bytes) -> Address:
    first, *rest = (decode_segment(segment) for segment in path[len(BUCKETS_ROOT) :].split(b"/"))
    bucket = check_bucket_id(first)
    if not rest:
        return Address(BUCKET, bucket=bucket)
    if rest == [LISTING_ID]:
        return Address(BUCKET_LISTING, bucket=bucket)
    name = stream_name(bucket, check_stream_id(bucket, rest[0]))
    match rest[1:]:
        case []:
            return Address(BUCKET_STREAM, name, bucket=bucket)
        case ["snapshot"]:
            return Address(LATEST_SNAPSHOT, name, bucket=bucket)
        case ["snapshot", offset]:
            return Address(SNAPSHOT, name, bucket=bucket, snapshot=offset)
        case ["bootstrap"]:
            return Address(BOOTSTRAP, name, bucket=bucket)
    raise InvalidName(
        "A stream id cannot contain a slash; below a stream there are only snapshot, snapshot/{offset} and bootstrap."
    )


def _decoded(raw: bytes) -> str:
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidSubscription("The path is not valid UTF-8; percent-encode its bytes in UTF-8.") from None
