"""Buckets: create, metadata, listing, delete (extensions §1.2 to §1.5), and our own list of all of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from headwater.core.buckets import check_page_limit, ids_of
from headwater.core.offsets import Offset
from headwater.engine.buckets import Bucket, BucketPage, Page
from headwater.engine.stream import LiveStream
from headwater.http.create import location
from headwater.http.request import Request
from headwater.http.response import CREATED, NO_CONTENT, NO_STORE, OK

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection

_JSON: Final = NO_STORE + b"Content-Type: application/json\r\n"

_encode: Final = msgspec.json.Encoder().encode


class BucketMetadata(msgspec.Struct):
    bucket_id: str
    streams: int
    created_at_ms: int


class BucketListing(msgspec.Struct):
    buckets: list[BucketMetadata]
    next_cursor: str | None
    has_more: bool


class StreamEntry(msgspec.Struct):
    """One stream of a listing. `tail_offset` is the number of its bytes; to read on from, use `next_offset`."""

    stream_id: str
    status: str
    content_type: str
    tail_offset: int
    created_at_ms: int
    last_write_at_ms: int
    next_offset: str


class Listing(msgspec.Struct):
    bucket_id: str
    prefix: str
    stream_count: int
    streams: list[StreamEntry]
    next_cursor: str | None
    has_more: bool


def create(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "create_bucket"
    app.engine.buckets.create(target.bucket, partial(connection.settle, _render_created))


def index(app: App, connection: Connection, request: Request, target: Target) -> None:
    """Every bucket there is, page by page, as the streams of one are listed."""
    connection.operation = "list_buckets"
    limit = check_page_limit(target.query.get("limit"))
    app.engine.buckets.all(target.query.get("after"), limit, partial(connection.settle, _render_buckets))


def show(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "show_bucket"
    app.engine.buckets.look_up(target.bucket, partial(connection.settle, _render_metadata))


def delete(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "delete_bucket"
    app.engine.buckets.delete(target.bucket, partial(connection.settle, _render_deleted))


def listing(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "list_bucket"
    query = target.query
    limit = check_page_limit(query.get("limit"))
    answer = partial(connection.settle, _render_page)
    app.engine.buckets.page(target.bucket, query.get("prefix", ""), query.get("after"), limit, answer)


def _render_created(connection: Connection, bucket: Bucket) -> None:
    connection.reply(CREATED, NO_STORE + b"Location: " + location(connection) + b"\r\n")


def _render_buckets(connection: Connection, page: BucketPage) -> None:
    buckets = [_metadata(bucket) for bucket in page.buckets]
    last = buckets[-1].bucket_id if buckets and page.has_more else None
    connection.reply(OK, _JSON, _encode(BucketListing(buckets, last, page.has_more)))


def _render_metadata(connection: Connection, bucket: Bucket) -> None:
    connection.reply(OK, _JSON, _encode(_metadata(bucket)))


def _metadata(bucket: Bucket) -> BucketMetadata:
    return BucketMetadata(bucket.id, len(bucket.ids), bucket.created_ms)


def _render_deleted(connection: Connection, bucket: Bucket) -> None:
    connection.reply(NO_CONTENT, NO_STORE)


def _render_page(connection: Connection, page: Page) -> None:
    streams = [_entry(stream) for stream in page.streams]
    last = streams[-1].stream_id if streams and page.has_more else None
    body = _encode(Listing(page.bucket_id, page.prefix, len(streams), streams, last, page.has_more))
    connection.reply(OK, _JSON, body)


def _entry(stream: LiveStream) -> StreamEntry:
    return StreamEntry(
        ids_of(stream.name)[1],
        "Closed" if stream.durable_closed else "Open",
        stream.type.header,
        stream.durable_position,
        stream.created_ms,
        stream.written_ms,
        str(Offset(stream.durable_index, stream.durable_position)),
    )
