"""An OpenAI-compatible endpoint that says what a test lets it say, when the test lets it."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.http_handlers import HandlerServer, QuietHandler

HUNG_UP_LIMIT_S = 60.0


class Model:
    """`say` sends tokens to the request that is open, `finish` ends it."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        """The application has closed the connection in the middle of an answer."""
        self._tokens: queue.Queue[str | None] = queue.Queue()
        self.url = ""

    def say(self, *tokens: str) -> None:
        for token in tokens:
            self._tokens.put(token)

    def finish(self) -> None:
        self._tokens.put(None)

    def reset(self) -> None:
        self._tokens = queue.Queue()
        self.hung_up.clear()

    def _handler(model) -> type[QuietHandler]:
        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                model.requests.append(json.loads(body))
                tokens = model._tokens
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                try:
                    self._answer(tokens)
                except OSError:
                    model.hung_up.set()

            def _answer(self, tokens: queue.Queue[str | None]) -> None:
                while True:
                    try:
                        token = tokens.get(timeout=0.1)
                    except queue.Empty:
                        self._send(b": still thinking\n\n")
                        continue
                    if token is None:
                        break
                    self._chunk({"content": token}, None)
                self._chunk({}, "stop")
                self._send(b"data: [DONE]\n\n")

            def _chunk(self, delta: dict[str, str], reason: str | None) -> None:
                event = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
                self._send(f"data: {json.dumps(event)}\n\n".encode())

            def _send(self, data: bytes) -> None:
                self.wfile.write(data)
                self.wfile.flush()

        return Handler

    @contextmanager
    def serving(self) -> Iterator[Model]:
        with HandlerServer(self._handler()).running() as server:
            self.url = f"{server.url}/v1"
            try:
                yield self
            finally:
                self.finish()
