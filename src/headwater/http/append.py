"""POST: append to a stream, close it, or both at once (protocol §5.2, §5.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from headwater.core.content import Messages
from headwater.core.json_steps import STEP_BYTES
from headwater.core.producers import parse_producer
from headwater.core.rules import AppendOutcome
from headwater.engine.results import Appended
from headwater.http.context import Context
from headwater.http.headers import NEXT_OFFSET, NO_CONTENT, NO_STORE, OK, STREAM_CLOSED, next_offset
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Deferred, Response
from headwater.http.splitting import Done, with_messages

_HEADERS: Final = NO_STORE + NEXT_OFFSET


def handle(context: Context, request: Request, address: Address) -> Deferred:
    headers = request.headers
    content_type = headers.get(b"content-type")
    producer = None
    if b"producer-id" in headers or b"producer-epoch" in headers or b"producer-seq" in headers:
        producer = parse_producer(
            request.header(b"producer-id"), request.header(b"producer-epoch"), request.header(b"producer-seq")
        )
    begin: Callable[[Done], None] = partial(
        context.engine.append,
        address.name,
        content_type.decode("latin-1") if content_type is not None else None,
        request.body,
        producer,
        request.header(b"stream-seq") if b"stream-seq" in headers else None,
        b"stream-closed" in headers and request.asks_to_close_stream(),
    )
    if len(request.body) > STEP_BYTES:
        begin = with_messages(context, request, partial(_append, begin))
    return Deferred(begin, _render if producer is None else partial(_render_to_producer, bool(request.body)))


def _append(append: Callable[..., None], messages: Messages | None, done: Done) -> None:
    append(done, messages=messages)


def _render(appended: Appended) -> Response:
    # One step instead of `next_offset` and additions: every append passes here.
    headers = _HEADERS % (appended.tail_index, appended.tail_position, appended.stream_id)
    return Response(NO_CONTENT, headers + STREAM_CLOSED if appended.closed else headers)


def _render_to_producer(has_data: bool, appended: Appended) -> Response:
    producer = appended.producer
    if producer is None:
        # A close without data: the stream was closed already, and has accepted nothing of this producer and epoch.
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
    # 200 says that data is new (§5.2.1); a repeat, or a close without data, is 204.
    is_new_data = appended.outcome is AppendOutcome.ACCEPTED and has_data
    return Response(OK if is_new_data else NO_CONTENT, headers)
