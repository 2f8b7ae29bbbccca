"""A chat whose answers stream in token by token: serves the page beside it, and answers what is asked in the stream.

    python examples/chat/chat.py          then open http://localhost:8437

The stream is the session. The page appends questions to it and shows what it holds; this script follows it and appends
answers, one token an event. Reload the page, open it twice, stop this script in the middle of an answer: everything
continues where it was, because all state is in the stream. Tokens are made by a simulated model; put a real one into
`tokens_for`.

Invariant: every token is appended once. The script's appends carry a producer id, an epoch that grows with each start
(so that a leftover of an earlier start is refused) and a number; what it must still say, it reads from the stream.
"""

from __future__ import annotations

import argparse
import http.server
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwater.client import ENDLESS_RETRY, Batch, ProducerStamp, Stream

PAGE = Path(__file__).with_name("index.html")

_WORDS = (
    "A durable stream is an append-only log behind a URL. I write one token at a time, you may reload in the middle of"
    " it, and nothing is lost or said twice, because the stream remembers and every reader keeps its own place."
)


def tokens_for(question: str) -> Iterator[str]:
    """A simulated model: it says the same to the same question, token by token."""
    yield f"You asked: “{question}” "
    for word in _WORDS.split():
        yield f"{word} "


def is_ours(event: Any) -> bool:
    """Others may write to the session too: what is no question, token or answer is passed over."""
    match event:
        case {"key": str(), "type": "message" | "chunk", "value": {"from": str(), "text": str()}}:
            return True
    return False


class Session:
    """The stream as this script writes it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._epoch = time.time_ns() // 1_000_000
        self._seqs = itertools.count()

    def append(self, event: dict[str, Any]) -> None:
        """Append exactly once: sent again under the same number until there is an answer."""
        self.stream.append(event, producer=ProducerStamp("assistant", self._epoch, next(self._seqs)))

    def events(self) -> Iterator[Batch]:
        """What the stream holds and what is appended, in batches."""
        return self.stream.follow().batches()


def answer_questions(session: Session, pause_s: float) -> None:
    """Follow the session, and answer every question that has no complete answer yet."""
    questions: dict[str, str] = {}
    said: dict[str, int] = {}
    for batch in session.events():
        for event in batch.values:
            if not is_ours(event):
                continue
            key, kind, value = event["key"], event["type"], event["value"]
            if kind == "message" and value["from"] == "you":
                questions[key] = value["text"]
            elif kind == "chunk":
                question = key.removesuffix(":answer")
                said[question] = said.get(question, 0) + 1
            elif kind == "message":
                questions.pop(key.removesuffix(":answer"), None)
        if batch.up_to_date:
            for key in list(questions):
                _answer(session, key, questions.pop(key), said.get(key, 0), pause_s)


def _answer(session: Session, key: str, question: str, said: int, pause_s: float) -> None:
    """Say what is still unsaid, then the whole as one message."""
    tokens = list(tokens_for(question))
    about = {"key": f"{key}:answer"}
    for token in tokens[said:]:
        session.append({**about, "type": "chunk", "operation": "append", "value": {"from": "assistant", "text": token}})
        time.sleep(pause_s)
    whole = {"from": "assistant", "text": "".join(tokens)}
    session.append({**about, "type": "message", "operation": "set", "value": whole})


def page_server(port: int, stream: str) -> http.server.ThreadingHTTPServer:
    """Serves the page, with the stream's address put in."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = PAGE.read_text(encoding="utf-8").replace("{{stream}}", stream).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Quiet: what happens is in the stream."""

    return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default=os.environ.get("DS_URL", "http://localhost:4437"), help="the server")
    parser.add_argument("--stream", default="chat/demo", help="the session")
    parser.add_argument("--port", type=int, default=8437, help="where the page is served; 0 picks a free port")
    parser.add_argument("--pause", type=float, default=0.06, metavar="SECONDS", help="between two tokens")
    arguments = parser.parse_args()
    url = f"{arguments.url.rstrip('/')}/v1/stream/{arguments.stream}"
    stream = Stream(url, retry=ENDLESS_RETRY)
    stream.create()
    session = Session(stream)
    pages = page_server(arguments.port, url)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    print(f"chat at http://localhost:{pages.server_port} (stream {url})", flush=True)
    try:
        answer_questions(session, arguments.pause)
    except KeyboardInterrupt:
        pages.shutdown()


if __name__ == "__main__":
    main()
