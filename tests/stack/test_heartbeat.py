"""The heartbeat's events: written with the client, and a tick that fails is not retried but followed by the next."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from headwater.client import Client
from headwater.stack import heartbeat as module
from headwater.stack.heartbeat import STREAM, Heartbeat
from headwater.testing import running_server
from tests.ports import free_port

NO_POSTGRES = "postgresql://postgres@127.0.0.1:1/nothing"


def test_even_ticks_append_an_event_to_a_new_or_existing_stream() -> None:
    with running_server() as server, Client(server.url) as client:
        heartbeat = Heartbeat(f"{server.url}/", NO_POSTGRES)
        heartbeat.beat(2)
        heartbeat.beat(4)
        heartbeat.close()
        stream = client.stream(STREAM)
        assert stream.head().content_type == "application/json"
        events = list(stream.read())
    assert [(event["key"], event["type"], event["operation"]) for event in events] == [
        ("heartbeat", "heartbeat", "set")
    ] * 2
    assert [event["value"]["tick"] for event in events] == [2, 4]


def test_refusal_of_the_server_is_reported_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    with running_server() as server, Client(server.url) as client:
        client.stream(STREAM).create("text/plain")
        heartbeat = Heartbeat(server.url, NO_POSTGRES)
        heartbeat.beat(2)
        heartbeat.close()
        assert not list(client.stream(STREAM).read())
    assert "tick 2 failed" in caplog.text


def test_tick_is_not_retried_while_the_server_is_down(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    heartbeat = Heartbeat(f"http://127.0.0.1:{port}", NO_POSTGRES)
    began_s = time.monotonic()
    heartbeat.beat(2)
    assert time.monotonic() - began_s < 10, "the client's own retries take 30 seconds"
    assert "tick 2 failed" in caplog.text
    with running_server(port=port) as server, Client(server.url) as client:
        heartbeat.beat(4)
        assert [event["value"]["tick"] for event in client.stream(STREAM).read()] == [4]
    heartbeat.close()


def test_heartbeat_speaks_to_the_server_only_through_the_client() -> None:
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "headwater" in imported
    assert not imported & {"httpx", "http", "urllib", "requests", "socket"}
