"""A real webhook receiver on loopback: a threaded HTTP server that records every request and answers as instructed."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.http_handlers import HandlerServer, QuietHandler

TRICKLE_S = 0.1
WAIT_S = 60.0
"""Long enough for a busy machine; a test that waits this long has failed."""


@dataclass(slots=True)
class Received:
    """One received request."""

    path: str
    headers: dict[str, str]
    raw: bytes
    at_s: float

    @property
    def body(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.raw)
        return parsed

    @property
    def signature(self) -> str:
        return self.headers["webhook-signature"]


@dataclass(slots=True)
class Reply:
    """The answer to send, and how slowly."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    trickles: bool = False
    """Send the body one byte at a time until `hold` is set."""
    hold: threading.Event | None = None
    """Send nothing before this is set; if it trickles, not the last byte."""


DONE = Reply(body=b'{"done": true}')


class Receiver:
    """Answers with `replies` in order, then with `otherwise`."""

    def __init__(self, replies: list[Reply], otherwise: Reply) -> None:
        self.received: list[Received] = []
        self.replies = replies
        self.otherwise = otherwise
        self.on_request: Callable[[Received], None] | None = None
        """Called before the answer is sent."""
        self.under_way = 0
        self.most_under_way = 0
        self._arrived = threading.Condition()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?x=1"

    def wait(self, count: int = 1, timeout_s: float = WAIT_S) -> Received:
        """Wait for the `count`th request."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.received) >= count, timeout_s), (
                f"{len(self.received)} of {count} requests were received within {timeout_s} s"
            )
        return self.received[count - 1]

    def take(self, received: Received) -> Reply:
        with self._arrived:
            self.received.append(received)
            reply = self.replies.pop(0) if self.replies else self.otherwise
            self._arrived.notify_all()
        if self.on_request is not None:
            self.on_request(received)
        return reply


@contextmanager
def receive(*replies: Reply, otherwise: Reply | None = None, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    receiver = Receiver(list(replies), otherwise or Reply())

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            raw = self.rfile.read(size)
            if len(raw) < size:
                self.close_connection = True
                return  # The caller died while sending, so there was no complete request.
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.under_way += 1
            receiver.most_under_way = max(receiver.most_under_way, receiver.under_way)
            try:
                self._answer(receiver.take(Received(self.path, headers, raw, time.monotonic())))
            except (BrokenPipeError, ConnectionResetError):
                pass  # The caller gave up, which some tests provoke.
            finally:
                receiver.under_way -= 1

        do_GET = do_POST

        def _answer(self, reply: Reply) -> None:
            if reply.hold is not None and not reply.trickles:
                reply.hold.wait(WAIT_S)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            if not reply.trickles:
                self.wfile.write(reply.body)
                return
            assert reply.hold is not None
            for byte in reply.body[:-1]:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                reply.hold.wait(TRICKLE_S)
            reply.hold.wait(WAIT_S)
            self.wfile.write(reply.body[-1:])

    class Server(HandlerServer):
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore callers that close the connection."""

    server = Server(Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    receiver.port = server.server_port
    with server.running():
        yield receiver
