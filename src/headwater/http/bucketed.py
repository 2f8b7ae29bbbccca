"""The bucketed surface: what lies below `/ds/`, and that a bucket must be there for anything in it (extensions §1).

    /ds                                              the list of buckets
    /ds/{bucket_id}                                  a bucket
    /ds/{bucket_id}/streams                          the listing of its streams
    /ds/{bucket_id}/{stream_id}                      a stream, with every operation of the base protocol
    /ds/{bucket_id}/{stream_id}/snapshot             its latest snapshot
    /ds/{bucket_id}/{stream_id}/snapshot/{offset}    that snapshot
    /ds/{bucket_id}/{stream_id}/bootstrap            snapshot and updates in one answer

Every segment is percent-decoded once, and checked after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from headwater.core.buckets import BUCKET_ROOT, LISTING_ID, check_bucket_id, check_stream_id, stream_name
from headwater.core.errors import InvalidName
from headwater.core.names import decode_segment
from headwater.engine.buckets import bucket_not_found
from headwater.http import append, bootstrap, buckets, create, delete, metadata, options, read, snapshots
from headwater.http.request import Request

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection

ROOT: Final = BUCKET_ROOT.encode()
INDEX: Final = ROOT.rstrip(b"/")

Handler: TypeAlias = "Callable[[App, Connection, Request, Target], None]"


class Address(NamedTuple):
    """What a path below `/ds/` names. `name` is a stream's canonical name, `snapshot` the offset of one of its."""

    handlers: Mapping[bytes, Handler]
    bucket: str
    name: str = ""
    snapshot: str = ""


def in_bucket(handler: Handler) -> Handler:
    """The same handler, where the bucket exists. Where it does not, the answer is 404 (§1.6)."""

    def handle(app: App, connection: Connection, request: Request, target: Target) -> None:
        if app.engine.buckets.exists(target.bucket):
            handler(app, connection, request, target)
        else:
            connection.operation = "no_bucket"
            answer = partial(connection.settle, _refused)
            app.engine.after_all_pending(answer, bucket_not_found(target.bucket))

    return handle


def _reserved(app: App, connection: Connection, request: Request, target: Target) -> None:
    check_stream_id(target.bucket, LISTING_ID)


def _refused(connection: Connection, result: object) -> None:
    raise AssertionError("a refusal is not rendered")


def _with_options(handlers: Mapping[bytes, Handler]) -> Mapping[bytes, Handler]:
    return {**handlers, b"OPTIONS": options.handle}


INDEX_HANDLERS: Final = _with_options({b"GET": buckets.index, b"HEAD": buckets.index})
BUCKET_HANDLERS: Final = _with_options(
    {b"PUT": buckets.create, b"GET": buckets.show, b"HEAD": buckets.show, b"DELETE": buckets.delete}
)
LISTING_HANDLERS: Final = _with_options(
    {b"GET": buckets.listing, b"HEAD": buckets.listing, b"PUT": _reserved, b"POST": _reserved, b"DELETE": _reserved}
)
STREAM_HANDLERS: Final = _with_options(
    {
        b"POST": in_bucket(append.handle),
        b"GET": in_bucket(read.handle),
        b"HEAD": in_bucket(metadata.handle),
        b"PUT": in_bucket(create.handle),
        b"DELETE": in_bucket(delete.handle),
    }
)
LATEST_SNAPSHOT_HANDLERS: Final = _with_options(
    {b"GET": in_bucket(snapshots.latest), b"HEAD": in_bucket(snapshots.latest)}
)
SNAPSHOT_HANDLERS: Final = _with_options(
    {
        b"PUT": in_bucket(snapshots.publish),
        b"GET": in_bucket(snapshots.read),
        b"HEAD": in_bucket(snapshots.read),
        b"DELETE": in_bucket(snapshots.delete),
    }
)
BOOTSTRAP_HANDLERS: Final = _with_options({b"GET": in_bucket(bootstrap.handle), b"HEAD": in_bucket(bootstrap.handle)})


def resolve(path: bytes) -> Address:
    """What a path that begins with `ROOT` names."""
    first, *rest = (decode_segment(segment) for segment in path[len(ROOT) :].split(b"/"))
    bucket_id = check_bucket_id(first)
    if not rest:
        return Address(BUCKET_HANDLERS, bucket_id)
    if rest == [LISTING_ID]:
        return Address(LISTING_HANDLERS, bucket_id)
    name = stream_name(bucket_id, check_stream_id(bucket_id, rest[0]))
    match rest[1:]:
        case []:
            return Address(STREAM_HANDLERS, bucket_id, name)
        case ["snapshot"]:
            return Address(LATEST_SNAPSHOT_HANDLERS, bucket_id, name)
        case ["snapshot", offset]:
            return Address(SNAPSHOT_HANDLERS, bucket_id, name, offset)
        case ["bootstrap"]:
            return Address(BOOTSTRAP_HANDLERS, bucket_id, name)
    raise InvalidName(
        "A stream id may not contain a slash, and below a stream there are only snapshot, snapshot/{offset} and"
        " bootstrap."
    )


def name_of(path: bytes) -> str:
    """The canonical name of a stream that a header names by its path."""
    address = resolve(path)
    if address.handlers is not STREAM_HANDLERS:
        raise InvalidName("The path names no stream.")
    return address.name
