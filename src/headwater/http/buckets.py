"""Buckets: create, metadata, listing, delete (extensions §1.2 to §1.5), and a listing of all buckets (our
extension)."""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from headwater.core.buckets import check_page_limit, ids_of
from headwater.core.offsets import Offset
from headwater.engine.buckets import BucketPage, BucketState, StreamPage
from headwater.engine.stream import LiveStream
from headwater.http.context import Context
from headwater.http.headers import CREATED, JSON_TYPE, NO_CONTENT, NO_STORE, OK, offset_text
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Deferred, Response

_JSON: Final = NO_STORE + JSON_TYPE

_encode: Final = msgspec.json.Encoder().encode


class BucketMetadata(msgspec.Struct):
    bucket_id: str
    streams: int
    created_at_ms: int


class BucketListing(msgspec.Struct):
    buckets: list[BucketMetadata]
    next_cursor: str | None
    has_more: bool


class ListedStream(msgspec.Struct):
    """One stream of a listing. `tail_offset` counts the bytes of all messages; to resume, use `next_offset`."""

    stream_id: str
    status: str
    content_type: str
    tail_offset: int
    created_at_ms: int
    last_write_at_ms: int
    next_offset: str


class StreamListing(msgspec.Struct):
    bucket_id: str
    prefix: str
    stream_count: int
    streams: list[ListedStream]
    next_cursor: str | None
    has_more: bool


def create(context: Context, request: Request, address: Address) -> Deferred:
    begin = partial(context.engine.buckets.create, address.bucket)
    return Deferred(begin, partial(_render_created, context.location(request)))


def index(context: Context, request: Request, address: Address) -> Deferred:
    """List all buckets, in pages like the streams of a bucket."""
    limit = check_page_limit(address.query.get("limit"))
    return Deferred(partial(context.engine.buckets.all, address.query.get("after"), limit), _render_buckets)


def show(context: Context, request: Request, address: Address) -> Deferred:
    return Deferred(partial(context.engine.buckets.look_up, address.bucket), _render_metadata)


def delete(context: Context, request: Request, address: Address) -> Deferred:
    return Deferred(partial(context.engine.buckets.delete, address.bucket), _render_deleted)


def listing(context: Context, request: Request, address: Address) -> Deferred:
    query = address.query
    limit = check_page_limit(query.get("limit"))
    begin = partial(context.engine.buckets.page, address.bucket, query.get("prefix", ""), query.get("after"), limit)
    return Deferred(begin, _render_page)


def _render_created(location: bytes, bucket: BucketState) -> Response:
    return Response(CREATED, NO_STORE + b"Location: " + location + b"\r\n")


def _render_buckets(page: BucketPage) -> Response:
    return render_bucket_listing([metadata_of_bucket(bucket) for bucket in page.buckets], has_more=page.has_more)


def render_bucket_listing(buckets: list[BucketMetadata], *, has_more: bool) -> Response:
    last = buckets[-1].bucket_id if buckets and has_more else None
    return Response(OK, _JSON, _encode(BucketListing(buckets, last, has_more)))


def _render_metadata(bucket: BucketState) -> Response:
    return Response(OK, _JSON, _encode(metadata_of_bucket(bucket)))


def metadata_of_bucket(bucket: BucketState) -> BucketMetadata:
    return BucketMetadata(bucket.id, len(bucket.ids), bucket.created_ms)


def _render_deleted(bucket: BucketState) -> Response:
    return Response(NO_CONTENT, NO_STORE)


def _render_page(page: StreamPage) -> Response:
    streams = [_entry(stream) for stream in page.streams]
    last = streams[-1].stream_id if streams and page.has_more else None
    body = _encode(StreamListing(page.bucket_id, page.prefix, len(streams), streams, last, page.has_more))
    return Response(OK, _JSON, body)


def _entry(stream: LiveStream) -> ListedStream:
    # Each stored JSON message is followed by a comma, which readers do not get.
    separators = stream.durable_index if stream.type.json else 0
    return ListedStream(
        ids_of(stream.name)[1],
        "Closed" if stream.durable_closed else "Open",
        stream.type.header,
        stream.durable_position - separators,
        stream.created_ms,
        stream.written_ms,
        offset_text(stream.id, Offset(stream.durable_index, stream.durable_position)),
    )
