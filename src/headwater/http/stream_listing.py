"""Listings of streams with their tails by prefix, and a long-poll for those that changed (extension).

One request shows which of many streams have new messages, so that a reader of thousands of them needs no connection
for each. Streams of a bucket are listed below the bucket, all others below `/v1/stream/__ds/streams`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from headwater.core.buckets import check_page_limit, stream_name
from headwater.core.errors import Refusal
from headwater.core.expiry import format_instant
from headwater.core.offsets import Offset
from headwater.engine.reading import earliest
from headwater.engine.stream import LiveStream
from headwater.engine.stream_index import ChangePage, IndexPage
from headwater.http.context import Context
from headwater.http.headers import JSON_TYPE, NO_CONTENT, NO_STORE, OK, offset_text
from headwater.http.paths import Address
from headwater.http.polling import WaitingPoll
from headwater.http.request import Request
from headwater.http.responses import Channel, Deferred, Response
from headwater.http.scopes import Scope
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
    """Set only if retention has dropped earlier messages."""
    snapshot_offset: str = ""
    deleted: bool = False
    created_at_ms: int = 0
    last_write_at_ms: int = 0
    ttl_secs: int | None = None
    expires_at: str | None = None


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
    """Whether the cursor was unknown: the client must list the streams again, then continue with `changes_cursor`."""


def index(context: Context, request: Request, address: Address) -> Deferred:
    """List streams of `/v1/stream/` by prefix, in pages."""
    query, scope = address.query, Scope.of(request)
    prefix, limit = scope.check_prefix(query.get("prefix", "")), check_page_limit(query.get("limit"))
    begin = partial(context.engine.index.page, prefix, query.get("after"), limit)
    return Deferred(begin, partial(_render_page, prefix, scope))


def changes(context: Context, request: Request, address: Address) -> ChangePoll:
    """List streams of `/v1/stream/` that changed after a cursor."""
    scope = Scope.of(request)
    scope.check_prefix(address.query.get("prefix", ""))
    return _poll(context, address, "", scope)


def bucket_changes(context: Context, request: Request, address: Address) -> ChangePoll:
    """List streams of a bucket that changed after a cursor."""
    return _poll(context, address, stream_name(address.bucket, ""), Scope())


def _poll(context: Context, address: Address, root: str, scope: Scope) -> ChangePoll:
    query = address.query
    limit = check_page_limit(query.get("limit"))
    return ChangePoll(context, root, root + query.get("prefix", ""), query.get("cursor"), limit, scope)


class ChangePoll(WaitingPoll):
    """One request that waits for a change. Without a cursor it returns at once, with the current cursor."""

    __slots__ = ("_cursor", "_limit", "_root", "_scope", "prefix")

    def __init__(self, context: Context, root: str, prefix: str, cursor: str | None, limit: int, scope: Scope) -> None:
        super().__init__(context)
        self._root = root
        self.prefix = prefix
        self._cursor = cursor
        self._limit = limit
        self._scope = scope

    def start(self, channel: Channel) -> None:
        self._wait(channel)
        self._context.engine.index.changes(self.prefix, self._cursor, self._limit, self._found)

    def wake(self, cursor: str) -> None:
        self._cursor = cursor
        self._context.engine.index.changes(self.prefix, cursor, self._limit, self._found)

    def on_drain(self) -> None:
        channel = self._leave()
        if channel is not None:
            channel.respond(Response(NO_CONTENT, NO_STORE))

    def _found(self, page: ChangePage | Refusal) -> None:
        if self._channel is None:
            return
        if isinstance(page, Refusal):
            self._channel.refuse(page)
            self._leave()
            return
        page = msgspec.structs.replace(page, changes=tuple(one for one in page.changes if self._scope.allows(one.name)))
        if page.changes or page.has_more or self._cursor is None or not page.is_complete:
            channel = self._leave()
            assert channel is not None
            channel.respond(self._render(page))
            return
        self._cursor = page.cursor
        self._context.engine.index.wait(self)

    def _render(self, page: ChangePage) -> Response:
        streams = [
            _deleted(change.name[len(self._root) :]) if change.stream is None else _tail(change.stream, self._root)
            for change in page.changes
        ]
        body = _encode(TailChanges(streams, page.cursor, page.has_more, not page.is_complete))
        return Response(OK, _HEADERS, body)

    def _forget(self) -> None:
        self._context.engine.index.leave(self)


def _render_page(prefix: str, scope: Scope, page: IndexPage) -> Response:
    streams = [_tail(stream, "") for stream in page.streams if scope.allows(stream.name)]
    last = page.streams[-1].name if page.has_more else None
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
        created_at_ms=stream.created_ms,
        last_write_at_ms=stream.written_ms,
        ttl_secs=stream.ttl_secs,
        expires_at=format_instant(stream.expires_at_ms) if stream.expires_at_ms is not None else None,
    )
