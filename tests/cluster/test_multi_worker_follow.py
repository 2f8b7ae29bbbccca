"""Following many streams over one connection, with streams of every worker."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.workers import name_in, processes, wait_for_restart
from tests.http.sse_reader import SseReader
from tests.serving import Server, serve

FOLLOW = "/v1/stream/__ds/follow"
JSON = {"Content-Type": "application/json"}
NAMES = [name_in(worker, 3, f"followed/{worker}-") for worker in range(3)]


def _id(client: httpx.Client, **body: Any) -> str:
    answer = client.post(FOLLOW, json=body)
    assert answer.status_code == 201, answer.text
    found: str = answer.json()["id"]
    return found


def _read(reader: SseReader, count: int) -> list[dict[str, Any]]:
    return [{"kind": event.kind, **json.loads(event.data)} for event in (reader.next() for _ in range(count))]


def _create(client: httpx.Client) -> None:
    for name in NAMES:
        client.put(f"/v1/stream/{name}", headers=JSON, content="[1,2]").raise_for_status()


def test_followers_get_the_streams_of_every_worker_and_resume() -> None:
    with serve(DS_SERVER__WORKERS="3") as server, httpx.Client(base_url=server.url) as client:
        _create(client)
        missing = {"missing": "-1"}
        # Every worker relays the connection to the one that assigned the id.
        ids = [_id(client, prefix="followed/", streams=missing) for _ in range(6)]
        for session in ids:
            with SseReader(server, f"{FOLLOW}/{session}") as reader:
                events = _read(reader, 5)
            assert sorted((event["kind"], event.get("stream", "")) for event in events) == sorted(
                [*(("data", name) for name in NAMES), ("problem", "missing"), ("control", "")]
            )
            assert all(event["messages"] == [1, 2] for event in events if event["kind"] == "data")
        _check_later_streams(server, client, ids[0])
        _check_from_now_on(server, client)


def _check_from_now_on(server: Server, client: httpx.Client) -> None:
    """`now` is the time of the first connection, for the streams of every worker."""
    session = _id(client, streams=dict.fromkeys(NAMES, "now"))
    with SseReader(server, f"{FOLLOW}/{session}") as reader:
        assert _read(reader, 1)[0]["kind"] == "control"
    for name in NAMES:
        client.post(f"/v1/stream/{name}", headers=JSON, content="[3]").raise_for_status()
    with SseReader(server, f"{FOLLOW}/{session}") as reader:
        assert sorted((event["stream"], event["messages"]) for event in _read(reader, 3)) == [
            (name, [3]) for name in sorted(NAMES)
        ]


def _check_later_streams(server: Server, client: httpx.Client, session: str) -> None:
    with SseReader(server, f"{FOLLOW}/{session}", headers={"Last-Event-ID": "3"}) as reader:
        assert sorted(event["kind"] for event in _read(reader, 2)) == ["control", "problem"]
        client.put("/v1/stream/followed/later", headers=JSON, content='["new"]').raise_for_status()
        assert _read(reader, 1)[0]["stream"] == "followed/later"
        # A fork is stored with its source, not with the owner of its name.
        fork = name_in(2, 3, "followed/fork")
        client.put(f"/v1/stream/{fork}", headers={"Stream-Forked-From": f"/v1/stream/{NAMES[0]}"}).raise_for_status()
        assert _read(reader, 1)[0]["stream"] == fork
        for name in (*NAMES, fork):
            client.post(f"/v1/stream/{name}", headers=JSON, content="[3]").raise_for_status()
        assert {event["stream"]: event["messages"] for event in _read(reader, 4)} == {
            key: [3] for key in (*NAMES, fork)
        }


def _kill(server: Server, number: int) -> None:
    killed = processes(server)[number]
    os.kill(killed.pid, signal.SIGKILL)
    wait_for_restart(server, {killed.pid}, 3)


def test_follower_reconnects_after_the_death_of_a_worker(tmp_path: Path) -> None:
    with (
        serve(DS_SERVER__WORKERS="3", DS_STORAGE__MODE="file-durable", directory=tmp_path) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        _create(client)
        session = _id(client, prefix="followed/")
        with SseReader(server, f"{FOLLOW}/{session}") as reader:
            _read(reader, 4)
            _kill(server, (int(session[0]) + 1) % 3)
            # The response ends, so that the client reconnects; it is cut if the connection belonged to that worker.
            with suppress(AssertionError, OSError):
                assert reader.ends()
        with (
            SseReader(server, f"{FOLLOW}/{session}", headers={"Last-Event-ID": "3"}) as again,
            httpx.Client(base_url=server.url) as other,
        ):
            assert _read(again, 1)[0]["kind"] == "control"
            for name in NAMES:
                other.post(f"/v1/stream/{name}", headers=JSON, content="[3]").raise_for_status()
            assert {event["stream"] for event in _read(again, 3)} == set(NAMES)
