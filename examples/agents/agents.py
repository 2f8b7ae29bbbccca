"""A session of several agents and people: who is present, who writes, and what was said, all in two streams.

    make example-agents                                    each agent is a process; kill one and watch
    python examples/agents/agents.py --stream chat/demo    all in one process, with a server of yours

The session is a stream. A question is answered in three steps by three agents: the planner answers the question, the
researcher answers the plan, the writer answers the facts. No agent talks to another one: each follows the session and
appends to it, token by token. Presence is a second stream with a heartbeat of each participant, because a session
should not grow while nobody says anything. The tokens are made by a simulated model; put a real one into `tokens_for`.

Invariant: every token is appended once. An agent's appends carry a producer id, an epoch that grows with each start (so
that a leftover of an earlier start is refused) and a number; what it must still say, it reads from the stream.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import itertools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.client import ENDLESS_RETRY, Batch, ProducerStamp, Stream

PAGE = Path(__file__).with_name("index.html")
HEARTBEAT_S = 2.0
PRESENCE_TTL_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Role:
    """An agent: it answers each message of `listens_to` about a question, under the key `{question}:{suffix}`."""

    name: str
    listens_to: str
    suffix: str
    words: str


ROLES = (
    Role(
        "planner",
        "you",
        "plan",
        "To answer this, the researcher finds out what a stream keeps, and the writer puts it into two sentences.",
    ),
    Role(
        "researcher",
        "planner",
        "facts",
        "A durable stream is an append-only log behind a URL. Every reader keeps its own place, so a reload, a second"
        " tab or a killed agent loses nothing.",
    ),
    Role(
        "writer",
        "researcher",
        "answer",
        "You may reload in the middle of this, or kill me. Nothing is lost or said twice, because the stream remembers"
        " what was said and I continue with the next word.",
    ),
)


def tokens_for(role: Role, question: str) -> Iterator[str]:
    """A simulated model: it says the same to the same question, token by token."""
    if role.listens_to == "you":
        yield f"The question is: “{question}” "
    for word in role.words.split():
        yield f"{word} "


def is_ours(event: Any) -> bool:
    """Others may write to the session too: what is not a question, a token or an answer is ignored."""
    match event:
        case {"key": str(), "type": "message" | "chunk", "value": {"from": str(), "text": str()}}:
            return True
    return False


class Session:
    """The stream as one agent writes it."""

    def __init__(self, stream: Stream, name: str) -> None:
        self.stream = stream
        self._producer = f"agent-{name}"
        self._epoch = time.time_ns() // 1_000_000
        self._seqs = itertools.count()

    def append(self, event: dict[str, Any]) -> None:
        """Append exactly once: sent again under the same number until there is an answer."""
        self.stream.append(event, producer=ProducerStamp(self._producer, self._epoch, next(self._seqs)))

    def events(self) -> Iterator[Batch]:
        """What the stream holds and what is appended, in batches."""
        return self.stream.follow().batches()


class Presence:
    """The heartbeat of a participant, from a thread."""

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._changed = threading.Event()
        self.status = "listening"

    def start(self) -> None:
        threading.Thread(target=self._beat, daemon=True).start()

    def becomes(self, status: str) -> None:
        self.status = status
        self._changed.set()

    def _beat(self) -> None:
        while True:
            value = {"name": self._name, "status": self.status, "at": time.time_ns() // 1_000_000}
            event = {"type": "presence", "key": f"agent:{self._name}", "operation": "set", "value": value}
            self._stream.append(event)
            self._changed.wait(HEARTBEAT_S)
            self._changed.clear()


class Agent:
    """Follows the session and answers every message to it that has no complete answer yet."""

    def __init__(self, role: Role, session: Session, presence: Presence, pause_s: float) -> None:
        self._role = role
        self._session = session
        self._presence = presence
        self._pause_s = pause_s
        self._open: dict[str, str] = {}
        """The messages to answer: what was said, by the key of the question."""
        self._said: dict[str, int] = {}
        """How many tokens of each answer are in the stream."""

    def run(self) -> None:
        self._presence.start()
        for batch in self._session.events():
            for event in batch.values:
                if is_ours(event):
                    self._apply(event["key"], event["type"], event["value"])
            if batch.up_to_date:
                for key in list(self._open):
                    self._answer(key, self._open.pop(key))

    def _apply(self, key: str, kind: str, value: dict[str, str]) -> None:
        question = key if value["from"] == "you" else key.rpartition(":")[0]
        if value["from"] == self._role.name and kind == "chunk":
            self._said[question] = self._said.get(question, 0) + 1
        elif value["from"] == self._role.name:
            self._open.pop(question, None)
        elif value["from"] == self._role.listens_to and kind == "message":
            self._open[question] = value["text"]

    def _answer(self, question: str, text: str) -> None:
        """Say what is still unsaid, then the whole as one message."""
        self._presence.becomes("writing")
        tokens = list(tokens_for(self._role, text))
        about = {"key": f"{question}:{self._role.suffix}"}
        for token in tokens[self._said.get(question, 0) :]:
            value = {"from": self._role.name, "text": token}
            self._session.append({**about, "type": "chunk", "operation": "append", "value": value})
            time.sleep(self._pause_s)
        whole = {"from": self._role.name, "text": "".join(tokens)}
        self._session.append({**about, "type": "message", "operation": "set", "value": whole})
        self._presence.becomes("listening")


def page_server(port: int, stream: str) -> http.server.ThreadingHTTPServer:
    """Serves the page, with the address of the session put in."""

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


def run_agent(role: Role, url: str, pause_s: float) -> None:
    with Stream(url, retry=ENDLESS_RETRY) as stream, Stream(f"{url}/presence", retry=ENDLESS_RETRY) as presence:
        Agent(role, Session(stream, role.name), Presence(presence, role.name), pause_s).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default=os.environ.get("DS_URL", "http://localhost:4437"), help="the server")
    parser.add_argument("--stream", default="chat/demo", help="the session")
    parser.add_argument("--port", type=int, default=8438, help="where the page is served; 0 picks a free port")
    parser.add_argument("--pause", type=float, default=0.06, metavar="SECONDS", help="between two tokens")
    parser.add_argument("--part", choices=["page", *(role.name for role in ROLES)], help="only this part")
    arguments = parser.parse_args()
    url = f"{arguments.url.rstrip('/')}/v1/stream/{arguments.stream}"
    for address, ttl_s in ((url, None), (f"{url}/presence", PRESENCE_TTL_S)):
        with Stream(address, retry=ENDLESS_RETRY) as stream:
            stream.create(ttl_s=ttl_s)
    threads = [
        threading.Thread(target=run_agent, args=(role, url, arguments.pause), daemon=True)
        for role in ROLES
        if arguments.part in {None, role.name}
    ]
    if arguments.part in {None, "page"}:
        pages = page_server(arguments.port, url)
        threads.append(threading.Thread(target=pages.serve_forever, daemon=True))
        print(f"session at http://localhost:{pages.server_port} (stream {url})", flush=True)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
