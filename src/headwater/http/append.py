"""POST: append to a stream, close it, or both at once (protocol §5.2, §5.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from headwater.core import native
from headwater.core.content import Messages
from headwater.core.fencing import TOKEN_PREFIX, WriteCredentials
from headwater.core.json_steps import STEP_BYTES
from headwater.core.producers import ProducerHeaders, parse_producer
from headwater.core.rules import AppendOutcome
from headwater.core.subscription_errors import TokenInvalid
from headwater.engine.results import Appended
from headwater.http.context import Context
from headwater.http.head_cache import PRODUCER_HEADERS
from headwater.http.headers import NEXT_OFFSET, NO_CONTENT, NO_STORE, OK, STREAM_CLOSED, next_offset
from headwater.http.paths import STREAM, Address
from headwater.http.request import Request
from headwater.http.responses import Deferred, Repeat, Response
from headwater.http.splitting import Done, with_messages

_BEGINNING: Final = NO_STORE + NEXT_OFFSET
_PRODUCER_HEADERS: Final = frozenset(PRODUCER_HEADERS)
_SPECIAL_HEADERS: Final = frozenset((b"stream-seq", b"stream-closed", b"write-fence", b"write-token", b"authorization"))
"""Headers that exclude an append from the fast paths."""


def handle(context: Context, request: Request, address: Address) -> Deferred:
    headers = request.headers
    content_type = headers.get(b"content-type")
    text = content_type.decode("latin-1") if content_type is not None else None
    # Only outside buckets: a stream of a bucket is looked up in its bucket each time.
    is_repeatable = (
        address.pattern == STREAM and len(request.body) <= STEP_BYTES and _SPECIAL_HEADERS.isdisjoint(headers)
    )
    if is_repeatable and _PRODUCER_HEADERS.isdisjoint(headers):
        repeat_for = partial(_repeat, context, text)
        first = partial(context.engine.append, address.name, text, request.body, None, None, False)
        return Deferred(first, _render, None, repeat_for(address.name, None), repeat_for)
    producer = None
    if b"producer-id" in headers or b"producer-epoch" in headers or b"producer-seq" in headers:
        producer = parse_producer(
            request.header(b"producer-id"), request.header(b"producer-epoch"), request.header(b"producer-seq")
        )
    begin: Callable[[Done], None] = partial(
        context.engine.append,
        address.name,
        text,
        request.body,
        producer,
        request.header(b"stream-seq") if b"stream-seq" in headers else None,
        b"stream-closed" in headers and request.asks_to_close_stream(),
    )
    if b"write-fence" in headers or (
        context.engine.fences.streams and (b"write-token" in headers or b"authorization" in headers)
    ):
        begin = _with_credentials(begin, request)
    if len(request.body) > STEP_BYTES:
        begin = with_messages(context, request, partial(_append, begin))
    if producer is None:
        return Deferred(begin, _render)
    render = partial(_render_to_producer, bool(request.body))
    return Deferred(
        begin, render, None, None, partial(_repeat, context, text, render=render) if is_repeatable else None
    )


def _repeat(
    context: Context,
    content_type: str | None,
    name: str,
    producer: ProducerHeaders | None,
    render: Callable[[Appended], Response] | None = None,
) -> Repeat | None:
    """How to process appends to a stream that have only a body, its type, and maybe a producer."""
    engine = context.engine
    if name not in engine.catalog.by_name or len(name) > context.limits.max_name_bytes:
        return None
    if render is None:
        return Repeat(partial(engine.append_plain, name, content_type), _BEGINNING, _headers, (name, content_type))
    return Repeat(partial(_append_produced, engine.append, name, content_type, producer), b"", render)


def _append_produced(
    append: Callable[..., None],
    name: str,
    content_type: str | None,
    producer: ProducerHeaders | None,
    body: bytes,
    done: Callable[[object], None],
) -> None:
    append(name, content_type, body, producer, None, False, done)


def _with_credentials(append: Callable[..., None], request: Request) -> Callable[..., None]:
    """Add the write token of the request to the append, for fenced streams."""
    credentials = credentials_of(request)
    is_missing = credentials is None or (credentials.is_bearer and not credentials.text.startswith(TOKEN_PREFIX))
    if is_missing and request.asks_to_fence_writes():
        raise TokenInvalid(
            "Write-Fence: true needs a write token; send the write_token of a claim as Authorization: Bearer."
        )
    return append if credentials is None else partial(append, credentials=credentials)


def credentials_of(request: Request) -> WriteCredentials | None:
    """The write token of a request, from its own header or from `Authorization`."""
    token = request.header(b"write-token")
    if token is not None:
        return WriteCredentials(token)
    scheme, _, bearer = (request.header(b"authorization") or "").partition(" ")
    return WriteCredentials(bearer.strip(), True) if scheme.lower() == "bearer" else None


def _append(append: Callable[..., None], messages: Messages | None, done: Done) -> None:
    append(done, messages=messages)


def _headers(appended: Appended) -> bytes:
    # `next_offset` inlined: every append passes here.
    token = native.offset_token(appended.tail_index, appended.tail_position, appended.stream_id)
    headers = b"%b%b\r\n" % (_BEGINNING, token)
    return headers + STREAM_CLOSED if appended.closed else headers


def _render(appended: Appended) -> Response:
    return Response(NO_CONTENT, _headers(appended))


def _render_to_producer(has_data: bool, appended: Appended) -> Response:
    producer = appended.producer
    if producer is None:
        # A close without data: the stream was already closed, and has no append of this producer and epoch.
        return _render(appended)
    headers = b"%b%bProducer-Epoch: %d\r\nProducer-Seq: %d\r\n%b" % (
        NO_STORE,
        next_offset(appended.stream_id, appended.tail_index, appended.tail_position),
        producer.epoch,
        producer.seq,
        STREAM_CLOSED if appended.closed else b"",
    )
    if appended.digest is not None:
        headers += b"Producer-Digest: crc32:%08x:%d\r\n" % divmod(appended.digest, 1 << 32)
    # 200 means that data is new (§5.2.1); a duplicate, or a close without data, is 204.
    is_new_data = appended.outcome is AppendOutcome.ACCEPTED and has_data
    return Response(OK if is_new_data else NO_CONTENT, headers)
