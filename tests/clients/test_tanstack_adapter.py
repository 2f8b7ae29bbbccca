"""The requests of TanStack AI's adapter `ai-durable-stream`, and the responses it expects (npm lacks the package).

It writes each run to `{server}/streams/{encodeURIComponent("runs/" + id)}`, so `/streams` is one of `server.roots`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.http.protocol import producer
from tests.http.sse_reader import SseReader
from tests.serving import Server, serve

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def rooted() -> Iterator[Server]:
    """A server whose live reads end early, so that the adapter must reconnect."""
    with serve(DS_SERVER__ROOTS="/v1/stream,/streams", DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="1") as server:
        yield server


@pytest.fixture(scope="module")
def http(rooted: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rooted.url) as client:
        yield client


class Run:
    """One run of a model: created, appended to in numbered batches, closed, and read by events."""

    def __init__(self, server: Server, http: httpx.Client, run_id: str) -> None:
        self.server = server
        self.http = http
        self.path = f"/streams/{quote(f'runs/{run_id}', safe='')}"
        self._producer_id = str(uuid.uuid4())
        self._batches = 0
        self._records = 0

    def create(self) -> str:
        created = self.http.put(self.path, headers=JSON)
        assert created.status_code in {200, 201}
        return created.headers["stream-next-offset"]

    def append(self, *chunks: str, retry: bool = False) -> str:
        records = [{"v": 1, "seq": self._records + n, "chunk": {"type": chunk}} for n, chunk in enumerate(chunks, 1)]
        self._records += len(records)
        headers = JSON | producer(self._producer_id, 0, self._batches)
        self._batches += 1
        answers = [self.http.post(self.path, content=json.dumps(records), headers=headers) for _ in range(1 + retry)]
        assert all(answer.is_success for answer in answers)
        return answers[-1].headers["stream-next-offset"]

    def close(self) -> str:
        closed = self.http.post(self.path, headers={"Stream-Closed": "true"})
        assert closed.is_success
        assert closed.headers["stream-closed"] == "true"
        return closed.headers["stream-next-offset"]

    def window(self, offset: str, cursor: str | None = None) -> tuple[list[str], dict[str, Any]]:
        """One live read to its end: the chunks, and the last control event. Only known events, in order."""
        query = f"&cursor={cursor}" if cursor is not None else ""
        chunks: list[str] = []
        control: dict[str, Any] = {}
        awaits_control = False
        with SseReader(self.server, self.path, offset=offset, query=query) as reader:
            for event in reader:
                awaits_control = event.kind == "data"
                if awaits_control:
                    chunks += [record["chunk"]["type"] for record in json.loads(event.data)]
                else:
                    control = event.control
                    assert control.get("streamClosed") or control["streamCursor"]
        assert not awaits_control
        return chunks, control


@pytest.mark.parametrize("run_id", ["0b4f7e5c-9f9e", "thread 7/run ü%", "a+b&c=d"])
def test_a_run_is_written_closed_and_replayed(rooted: Server, http: httpx.Client, run_id: str) -> None:
    run = Run(rooted, http, run_id)
    start = run.create()
    assert run.create() == start
    middle = run.append("RUN_STARTED", "TEXT_MESSAGE_CONTENT")
    end = run.append("TEXT_MESSAGE_END", "RUN_FINISHED", retry=True)
    assert run.close() == end
    everything = ["RUN_STARTED", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END", "RUN_FINISHED"]
    for offset, expected in (("-1", everything), (start, everything), (middle, everything[2:]), (end, [])):
        chunks, control = run.window(offset)
        assert (chunks, control["streamNextOffset"], control["streamClosed"]) == (expected, end, True)
    assert http.get(f"/v1/stream/runs/{quote(run_id)}", params={"offset": "-1"}).json()[0]["seq"] == 1


def test_each_window_of_a_silent_run_moves_the_cursor(rooted: Server, http: httpx.Client) -> None:
    """The adapter gives up on a window that ends at its start offset."""
    run = Run(rooted, http, "silent")
    offset, cursor = run.create(), None
    seen = set()
    for _ in range(3):
        chunks, control = run.window(offset, cursor)
        assert (chunks, control["streamNextOffset"]) == ([], offset)
        cursor = control["streamCursor"]
        seen.add(cursor)
    assert len(seen) == 3
