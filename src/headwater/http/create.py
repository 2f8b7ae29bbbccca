"""PUT: create a stream, or confirm that it is as asked for (protocol §5.1)."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Final

from headwater.core.content import check_content_type
from headwater.core.errors import BadRequest, InvalidExpiry
from headwater.core.expiry import parse_expires_at, parse_ttl
from headwater.core.retention import parse_policy
from headwater.core.rules import CreateRequest, ForkRequest
from headwater.engine.engine import Created
from headwater.http.request import Request
from headwater.http.response import CREATED, NO_STORE, OK, STREAM_CLOSED, header, next_offset

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection


_SUB_OFFSET: Final = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)


def handle(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "create"
    content_type = request.header(b"content-type")
    ttl = request.header(b"stream-ttl")
    expires_at = request.header(b"stream-expires-at")
    if ttl is not None and expires_at is not None:
        raise InvalidExpiry("Send Stream-TTL or Stream-Expires-At, not both.")
    wanted = CreateRequest(
        target.name,
        check_content_type(content_type) if content_type is not None else None,
        parse_ttl(ttl) if ttl is not None else None,
        parse_expires_at(expires_at) if expires_at is not None else None,
        request.asks_to_close_stream(),
        request.body,
        _fork(app, request),
        parse_policy(
            request.header(b"stream-retention-age"),
            request.header(b"stream-retention-bytes"),
            request.header(b"stream-retention-drop"),
        ),
    )
    answer = partial(connection.settle, _render)
    if target.bucket:
        app.engine.buckets.create_stream(target.bucket, wanted, answer)
    else:
        app.engine.create(wanted, answer)


def _fork(app: App, request: Request) -> ForkRequest | None:
    """What the fork headers ask for; they mean nothing without a source."""
    source = request.headers.get(b"stream-forked-from")
    offset = request.header(b"stream-fork-offset")
    sub_offset = request.header(b"stream-fork-sub-offset")
    if source is None:
        if offset is not None or sub_offset is not None:
            raise BadRequest("Stream-Fork-Offset and Stream-Fork-Sub-Offset need Stream-Forked-From.")
        return None
    if sub_offset is not None and _SUB_OFFSET.fullmatch(sub_offset) is None:
        raise BadRequest("Stream-Fork-Sub-Offset must be a whole number without sign or leading zeros.")
    return ForkRequest(app.name_of_path(source), offset, int(sub_offset or 0))


def _render(connection: Connection, created: Created) -> None:
    headers = [
        NO_STORE,
        header("Content-Type", created.stream.type.header),
        next_offset(created.tail.index, created.tail.position),
    ]
    if created.closed:
        headers.append(STREAM_CLOSED)
    if created.is_new:
        headers.append(b"Location: " + location(connection) + b"\r\n")
    connection.reply(CREATED if created.is_new else OK, b"".join(headers))


def location(connection: Connection) -> bytes:
    """The stream's own URL, as the client reached it."""
    request = connection.request
    path = request.target.partition(b"?")[0]
    if not path.startswith(b"/"):
        return path
    return request.origin(connection.app.scheme).encode("latin-1") + path
