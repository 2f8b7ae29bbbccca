"""A connection that has ended is freed at once: its parser leaves no reference cycle for the garbage collector."""

from __future__ import annotations

import gc
import weakref

from headwater.http.flow import ByteBudget
from headwater.http.parser import ParserLimits, RequestParser
from headwater.http.request import Request


class Sink:
    """A connection that ignores requests."""

    def __init__(self) -> None:
        self.parser = RequestParser(ParserLimits(8192, 8192, 8192, 30.0), ByteBudget(8192), lambda *_: None, self)
        self.requests: list[Request] = []

    def on_request(self, request: Request) -> None:
        self.requests.append(request)

    def on_expect_continue(self) -> None:
        """Nothing to send."""

    def begin_upload(self, head: Request) -> None:
        """Keep all bodies in memory."""

    def on_upload_ahead(self) -> None:
        """Do nothing: there are no uploads."""


def test_a_closed_parser_needs_no_garbage_collection() -> None:
    sink = Sink()
    sink.parser.feed(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nPOST /v1/stream/a HTTP/1.1\r\nHost: x\r\n", 0.0)
    assert [request.target for request in sink.requests] == [b"/healthz"]
    freed = weakref.ref(sink)
    gc.disable()
    try:
        sink.parser.close()
        del sink
        assert freed() is None
    finally:
        gc.enable()
