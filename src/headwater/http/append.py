"""POST: append to a stream, close it, or both at once (protocol §5.2, §5.3)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headwater.core.producers import parse_producer
from headwater.core.rules import Outcome
from headwater.engine.engine import Appended
from headwater.http.request import Request
from headwater.http.response import NO_CONTENT, NO_STORE, OK, STREAM_CLOSED, next_offset

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection


def handle(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "append"
    headers = request.headers
    content_type = headers.get(b"content-type")
    producer = None
    if b"producer-id" in headers or b"producer-epoch" in headers or b"producer-seq" in headers:
        producer = parse_producer(
            request.header(b"producer-id"), request.header(b"producer-epoch"), request.header(b"producer-seq")
        )
    app.engine.append(
        target.name,
        content_type.decode("latin-1") if content_type is not None else None,
        request.body,
        producer,
        request.header(b"stream-seq") if b"stream-seq" in headers else None,
        b"stream-closed" in headers and request.asks_to_close_stream(),
        partial(connection.settle, _render),
    )


def _render(connection: Connection, appended: Appended) -> None:
    offset = next_offset(appended.tail_index, appended.tail_position)
    producer = appended.producer
    if producer is None:
        closed = STREAM_CLOSED if appended.closed else b""
        connection.reply(NO_CONTENT, NO_STORE + offset + closed)
        return
    headers = b"%bProducer-Epoch: %d\r\nProducer-Seq: %d\r\n%b" % (
        NO_STORE + offset,
        producer.epoch,
        producer.seq,
        STREAM_CLOSED if appended.closed else b"",
    )
    if appended.digest is not None:
        headers += b"Producer-Digest: crc32:%08x:%d\r\n" % divmod(appended.digest, 1 << 32)
    # 200 says that data is new (§5.2.1); a repeat, or a close that brought none, is 204.
    is_new_data = appended.outcome is Outcome.ACCEPTED and connection.request.body
    connection.reply(OK if is_new_data else NO_CONTENT, headers)
