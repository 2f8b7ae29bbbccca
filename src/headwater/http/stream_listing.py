"""Listings of many streams: names with their tails by prefix, and a long-poll for those that changed (extension).

One request shows which of many streams have new messages, so that a reader of thousands of them needs no connection
for each. Streams of a bucket are reached below the bucket, all others below `/v1/stream/__ds/streams`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from headwater.core.buckets import check_page_limit, stream_name
from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.engine.reading import earliest
from headwater.engine.stream import LiveStream
from headwater.engine.stream_index import ChangePage, IndexPage
from headwater.http.context import Context
from headwater.http.deadlines import Deadline
from headwater.http.headers import JSON_TYPE, NO_CONTENT, NO_STORE, OK, offset_text
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Channel, Deferred, Response
from headwater.http.snapshots import offset_of

_HEADERS: Final = NO_STORE + JSON_TYPE

_encode: Final = msgspec.json.Encoder().encode


class StreamTail(msgspec.Struct, omit_defaults=True):
    """One stream of a listing. A deleted one has only its name."""

    name: str
    next_offset: str = ""
    content_type: str = ""
    closed: bool = False
    earliest_offset: str = ""
    """Only if retention dropped what was before it."""
    snapshot_offset: str = ""
    deleted: bool = False


class TailListing(msgspec.Struct):
    prefix: str
    streams: list[StreamTail]
    next_cursor: str | None
    has_more: bool


class TailChanges(msgspec.Struct):
    streams: list[StreamTail]
    changes_cursor: str
    has_more: bool
    reset: bool
    """The cursor was unknown: list the streams again, then continue with this one."""


def index(context: Context, request: Request, address: Address) -> Deferred:
    """Streams of `/v1/stream/` by prefix, page by page."""
    query = address.query
    prefix, limit = query.get("prefix", ""), check_page_limit(query.get("limit"))
    begin = partial(context.engine.index.page, prefix, query.get("after"), limit)
    return Deferred(begin, partial(_render_page, prefix))


def changes(context: Context, request: Request, address: Address) -> ChangePoll:
    """Streams of `/v1/stream/` that changed after a cursor."""
    return _poll(context, address, "")


def bucket_changes(context: Context, request: Request, address: Address) -> ChangePoll:
    """Streams of a bucket that changed after a cursor."""
    return _poll(context, address, stream_name(address.bucket, ""))


def _poll(context: Context, address: Address, root: str) -> ChangePoll:
    query = address.query
    limit = check_page_limit(query.get("limit"))
    return ChangePoll(context, root, root + query.get("prefix", ""), query.get("cursor"), limit)


class ChangePoll:
    """One request that waits for a change. Without a cursor it is answered at once, with the current cursor."""

    __slots__ = ("_channel", "_context", "_cursor", "_deadline", "_limit", "_root", "prefix")

    def __init__(self, context: Context, root: str, prefix: str, cursor: str | None, limit: int) -> None:
        self._context = context
        self._root = root
        self.prefix = prefix
        self._cursor = cursor
        self._limit = limit
        self._channel: Channel | None = None
        self._deadline: Deadline | None = None

    def start(self, channel: Channel) -> None:
        self._channel = channel
        self._deadline = self._context.long_poll_deadlines.set(self.on_drain)
        self._context.metrics.followers["long-poll"] += 1
        self._context.engine.index.changes(self.prefix, self._cursor, self._limit, self._found)

    def wake(self) -> None:
        self._found(self._context.engine.index.changes_now(self.prefix, self._cursor, self._limit))

    def on_writable(self) -> None:
        """Nothing was written yet."""

    def on_drain(self) -> None:
        channel = self._leave()
        if channel is not None:
            channel.respond(Response(NO_CONTENT, NO_STORE))

    def on_disconnect(self) -> None:
        self._leave()

    def _found(self, page: ChangePage | Refusal) -> None:
        if self._channel is None:
            return
        if isinstance(page, Refusal):
            self._channel.refuse(page)
            self._leave()
            return
        if page.changes or self._cursor is None or not page.is_complete:
            channel = self._leave()
            assert channel is not None
            channel.respond(self._render(page))
            return
        self._context.engine.index.wait(self)

    def _render(self, page: ChangePage) -> Response:
        streams = [
            _deleted(change.name[len(self._root) :]) if change.stream is None else _tail(change.stream, self._root)
            for change in page.changes
        ]
        body = _encode(TailChanges(streams, page.cursor, page.has_more, not page.is_complete))
        return Response(OK, _HEADERS, body)

    def _leave(self) -> Channel | None:
        """Stop waiting. Returns the channel to answer on, if the request is not answered yet."""
        channel, self._channel = self._channel, None
        if channel is not None:
            assert self._deadline is not None
            self._deadline.cancel()
            self._context.metrics.followers["long-poll"] -= 1
            self._context.engine.index.leave(self)
        return channel


def _render_page(prefix: str, page: IndexPage) -> Response:
    streams = [_tail(stream, "") for stream in page.streams]
    last = streams[-1].name if streams and page.has_more else None
    return Response(OK, _HEADERS, _encode(TailListing(prefix, streams, last, page.has_more)))


def _deleted(name: str) -> StreamTail:
    return StreamTail(name, deleted=True)


def _tail(stream: LiveStream, root: str) -> StreamTail:
    return StreamTail(
        stream.name[len(root) :],
        offset_text(stream.id, Offset(stream.durable_index, stream.durable_position)),
        stream.type.header,
        stream.durable_closed,
        offset_text(stream.id, earliest(stream)) if stream.durable_retained_index else "",
        offset_of(stream, stream.durable_snapshot) if stream.durable_snapshot is not None else "",
    )
