"""Durable sessions end to end: the reference's eight scenarios and its tutorial's SQL, by a real `headwater sync`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psycopg
import pytest

from headwater.stack.database import LocalPostgres
from tests.docs.pictures import agents_script
from tests.examples.loading import example
from tests.offsets import offset_of
from tests.pipeline.syncing import Sync, syncing
from tests.pipeline.waiting import eventually
from tests.serving import Server
from tests.spark.session import worker_environment
from tests.spark.streams import JSON, Streams

PRESENCE = {"key": "user:alice", "type": "presence", "operation": "set", "value": {"status": "online"}}


@pytest.fixture(scope="module")
def sync(server: Server, postgres: LocalPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sync]:
    directory = tmp_path_factory.mktemp("sync")
    with syncing(directory, server.url, postgres.url, environ={"ELECTRIC_URL": "http://electric:3000"}) as running:
        running.wait_until_ready()
        yield running
        assert running.stop() == 0, running.log()[-3000:]


def message(key: str, text: str) -> dict[str, Any]:
    return {"key": key, "type": "message", "operation": "set", "value": {"text": text}}


def append(streams: Streams, name: str, events: list[Any], producer: str, seq: int) -> httpx.Response:
    headers = {"Content-Type": JSON, "Producer-Id": producer, "Producer-Epoch": "0", "Producer-Seq": str(seq)}
    return streams.http.post(f"{streams.root}/{name}", content=json.dumps(events), headers=headers)


def asked(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()


# -- the session pattern: five scenarios -------------------------------------------------------------------------------


def test_session_lifecycle_create_write_presence_read_back(streams: Streams) -> None:
    streams.create("session-life")
    streams.append("session-life", [PRESENCE])
    assert streams.messages("session-life") == [PRESENCE]


def test_chat_of_several_producers_keeps_the_order_of_arrival(streams: Streams) -> None:
    streams.create("session-chat")
    spoken = [("alice-tab-1", 0, "Hello!"), ("ai-assistant", 0, "Hi Alice"), ("alice-tab-1", 1, "How are you?")]
    for producer, seq, text in spoken:
        assert append(streams, "session-chat", [message(f"msg:{text}", text)], producer, seq).status_code == 200
    assert [one["value"]["text"] for one in streams.messages("session-chat")] == [text for _, _, text in spoken]


def test_sse_subscriber_is_notified_at_once(streams: Streams) -> None:
    streams.create("session-live")
    heard: list[Any] = []
    done = threading.Event()

    def listen() -> None:
        with httpx.stream(
            "GET", f"{streams.root}/session-live", params={"offset": "-1", "live": "sse"}, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:") and "Hello!" in line:
                    heard.append(line)
                    done.set()
                    return

    listener = threading.Thread(target=listen)
    listener.start()
    streams.append("session-live", [message("msg:1", "Hello!")])
    assert done.wait(60)
    listener.join()
    assert json.loads(heard[0].removeprefix("data:"))[0]["value"] == {"text": "Hello!"}


def test_a_session_is_taken_up_where_it_was_left(streams: Streams) -> None:
    streams.create("session-back")
    saved = streams.append("session-back", [message("msg:1", "before")])
    streams.append("session-back", [message("msg:2", "after")])
    answer = streams.http.get(f"{streams.root}/session-back", params={"offset": saved})
    assert [one["value"]["text"] for one in answer.json()] == ["after"]


def test_a_repeated_append_is_taken_once(streams: Streams) -> None:
    streams.create("session-once")
    assert append(streams, "session-once", [PRESENCE], "alice", 0).status_code == 200
    assert append(streams, "session-once", [PRESENCE], "alice", 0).status_code == 204
    assert append(streams, "session-once", [message("msg:1", "next")], "alice", 1).status_code == 200
    assert len(streams.messages("session-once")) == 2


# -- with the database: three scenarios --------------------------------------------------------------------------------


def test_a_row_of_postgres_appears_in_the_stream(sync: Sync, streams: Streams, postgres: LocalPostgres) -> None:
    with psycopg.connect(postgres.url) as connection:
        connection.execute("INSERT INTO items (title, body) VALUES ('first', 'of items')")
    found = eventually(lambda: streams.messages("pg-items"), bool)
    assert (found[0]["title"], found[0]["body"]) == ("first", "of items")
    assert found[0].keys() == {"id", "title", "body", "created_at"}


def test_an_event_of_the_stream_appears_in_postgres(sync: Sync, streams: Streams, postgres: LocalPostgres) -> None:
    offset = streams.append("session-events", [PRESENCE])
    found = eventually(
        lambda: asked(
            postgres.url,
            "SELECT stream_name, event_key, event_type, operation, payload, ds_offset FROM session_events"
            " WHERE event_key = 'user:alice'",
        ),
        lambda rows: len(rows) > 0,
    )
    assert found == [("session-events", "user:alice", "presence", "set", PRESENCE, str.__str__(offset_of(offset)))]


def test_the_way_round_an_insert_is_in_the_stream_with_its_id(
    sync: Sync, streams: Streams, postgres: LocalPostgres
) -> None:
    with psycopg.connect(postgres.url) as connection:
        row = connection.execute("INSERT INTO items (title) VALUES ('round trip') RETURNING id").fetchone()
        assert row is not None
    found = eventually(lambda: [one for one in streams.messages("pg-items") if one["title"] == "round trip"], bool)
    assert [one["id"] for one in found] == [row[0]]


# -- the tutorial's SQL, and how the application reports itself -------------------------------------------------------


def test_the_sql_of_the_tutorial_answers(sync: Sync, streams: Streams, postgres: LocalPostgres) -> None:
    events = [
        message("msg:1", "Hello!"),
        {"key": "user:bob", "type": "presence", "operation": "set", "value": {"status": "away"}},
        message("msg:2", "Anybody?"),
    ]
    streams.append("session-events", events)
    eventually(
        lambda: asked(postgres.url, "SELECT count(*) FROM session_events WHERE event_type = 'message'"),
        lambda found: found[0][0] >= 2,
    )
    messages = asked(
        postgres.url,
        "SELECT payload->'value'->>'text' FROM session_events WHERE event_type = 'message' ORDER BY received_at, id",
    )
    assert [row[0] for row in messages] == ["Hello!", "Anybody?"]
    active = asked(
        postgres.url,
        "SELECT event_key, payload->'value'->>'status' FROM session_events"
        " WHERE event_type = 'presence' AND operation = 'set' ORDER BY received_at DESC",
    )
    assert ("user:bob", "away") in active


def test_status_is_published_to_prometheus_and_to_the_page(
    sync: Sync, streams: Streams, postgres: LocalPostgres
) -> None:
    streams.append("session-events", [{"key": "user:bob", "type": "typing", "operation": "set", "value": {}}])

    def entities() -> dict[tuple[str, str], Any]:
        return {(one["type"], one["key"]): one["value"] for one in streams.messages("__pipeline__")}

    found = eventually(
        entities,
        lambda found: (
            ("slot", "headwater") in found and found.get(("query", "session-events"), {}).get("batch") is not None
        ),
    )
    query = found["query", "session-events"]
    assert query["status"] == "running"
    assert (query["source"], query["target"]) == ("session-events", "table session_events")
    assert query["batch_ms"] > 0
    assert query["lag_messages"] == 0
    assert query["offsets"]["session-events"] <= streams.tail("session-events")
    assert found["slot", "headwater"]["lag_bytes"] >= 0
    metrics = sync.metrics()
    assert 'headwater_pipeline_running{job="pg-items"} 1.0' in metrics
    assert 'headwater_slot_lag_bytes{slot="headwater"}' in metrics
    assert "ELECTRIC_URL=http://electric:3000 is not used" in sync.log()


def test_slots_are_listed_by_command(sync: Sync, postgres: LocalPostgres) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headwater", "sync", "slots", "ls", "--postgres", postgres.url],
        env=worker_environment(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(b"headwater\t")


def test_the_session_of_the_agents_example_can_be_asked_in_sql(
    sync: Sync, server: Server, streams: Streams, postgres: LocalPostgres
) -> None:
    question = {"from": "you", "text": "What is kept?"}
    asking = {"key": "msg:chat-in-sql", "type": "message", "operation": "set", "value": question}
    agents = example("agents/agents")
    tokens = list(agents.tokens_for(agents.ROLES[-1], ""))
    with agents_script(server, "session-events", pause_s=0.0):
        streams.append("session-events", [asking])
        answers = eventually(
            lambda: asked(
                postgres.url,
                "SELECT payload->'value'->>'text' FROM session_events"
                " WHERE event_type = 'message' AND event_key = 'msg:chat-in-sql:answer'",
            ),
            bool,
        )
    assert answers == [("".join(tokens),)]
    pieces = "SELECT event_key, count(*) FROM session_events WHERE event_type = 'chunk' GROUP BY event_key"
    assert ("msg:chat-in-sql:answer", len(tokens)) in asked(postgres.url, pieces)
