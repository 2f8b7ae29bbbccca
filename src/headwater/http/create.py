"""PUT: create a stream, or confirm that it exists with the same configuration (protocol §5.1)."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Final

from headwater.core.content import Messages, check_content_type
from headwater.core.errors import BadRequest, InvalidExpiry
from headwater.core.expiry import parse_expires_at, parse_ttl
from headwater.core.retention import parse_policy
from headwater.core.rules import CreateRequest, ForkRequest
from headwater.engine.results import Created
from headwater.http.context import Context
from headwater.http.headers import CREATED, NO_STORE, OK, STREAM_CLOSED, WRITE_FENCE, header, next_offset
from headwater.http.paths import Address, stream_at
from headwater.http.request import Request
from headwater.http.responses import Deferred, Response
from headwater.http.splitting import Done, with_messages

_SUB_OFFSET: Final = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)


def handle(context: Context, request: Request, address: Address) -> Deferred:
    content_type = request.header(b"content-type")
    ttl = request.header(b"stream-ttl")
    expires_at = request.header(b"stream-expires-at")
    if ttl is not None and expires_at is not None:
        raise InvalidExpiry("Send Stream-TTL or Stream-Expires-At, not both.")
    create = CreateRequest(
        address.name,
        check_content_type(content_type) if content_type is not None else None,
        parse_ttl(ttl) if ttl is not None else None,
        parse_expires_at(expires_at) if expires_at is not None else None,
        request.asks_to_close_stream(),
        request.body,
        _fork(context, request),
        parse_policy(
            request.header(b"stream-retention-age"),
            request.header(b"stream-retention-bytes"),
            request.header(b"stream-retention-drop"),
        ),
        fenced=request.asks_to_fence_writes(),
    )
    begin = with_messages(context, request, partial(_create, context, address, create), creating=True)
    return Deferred(begin, partial(_render, context.location(request), create.fenced))


def _create(context: Context, address: Address, create: CreateRequest, messages: Messages | None, done: Done) -> None:
    if messages is not None:
        create = replace(create, messages=messages)
    if address.bucket:
        context.engine.buckets.create_stream(address.bucket, create, done)
    else:
        context.engine.create(create, done)


def _fork(context: Context, request: Request) -> ForkRequest | None:
    """The fork that the headers request. The other fork headers need Stream-Forked-From."""
    source = request.headers.get(b"stream-forked-from")
    offset = request.header(b"stream-fork-offset")
    sub_offset = request.header(b"stream-fork-sub-offset")
    if source is None:
        if offset is not None or sub_offset is not None:
            raise BadRequest(
                "Stream-Fork-Offset and Stream-Fork-Sub-Offset need Stream-Forked-From, the path of the source; send"
                " it too."
            )
        return None
    if sub_offset is not None and _SUB_OFFSET.fullmatch(sub_offset) is None:
        raise BadRequest(
            f"Stream-Fork-Sub-Offset must be a whole number without sign or leading zeros, not {sub_offset!r}."
        )
    name = stream_at(source, context.limits.max_name_bytes, context.root_aliases)
    return ForkRequest(name, offset, int(sub_offset or 0))


def fork_source(context: Context, request: Request) -> str | None:
    """The name of the stream that a create request forks, or None."""
    fork = _fork(context, request)
    return fork.source_name if fork is not None else None


def _render(location: bytes, fenced: bool, created: Created) -> Response:
    headers = [
        NO_STORE,
        header("Content-Type", created.stream.type.header),
        next_offset(created.stream.id, created.tail.message_index, created.tail.byte_position),
        # Even if the stream already existed: the reference server sends it on every successful PUT.
        b"Location: " + location + b"\r\n",
    ]
    if created.closed:
        headers.append(STREAM_CLOSED)
    if fenced:
        headers.append(WRITE_FENCE)
    return Response(CREATED if created.is_new else OK, b"".join(headers))
