"""`durable_response` with FastAPI and uvicorn: the contract, and what reloads, stops, failures and shutdowns leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from headwater.client import Stream, StreamClosedError
from tests.ai.app import WORDS, serving
from tests.ai.processes import application_process
from tests.serving import Server


@pytest.fixture(scope="module")
def app(server: Server) -> Iterator[str]:
    with serving(f"{server.url}/v1/stream") as url:
        yield url


@pytest.fixture
def chat_id(stream_name: Callable[[], str]) -> str:
    return stream_name()


@pytest.fixture
def stream(server: Server, chat_id: str) -> Iterator[Stream]:
    with Stream(server.stream_url(f"answers/{chat_id}")) as stream:
        yield stream


def text_of(events: list[Any]) -> list[str]:
    return [event["delta"].strip() for event in events if event["type"] == "text-delta"]


def test_the_response_names_the_stream_and_the_stream_has_the_answer(app: str, chat_id: str, stream: Stream) -> None:
    response = httpx.post(f"{app}/api/chat", json={"id": chat_id, "messages": []})
    assert response.status_code == 201
    assert response.headers["location"] == stream.url
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["access-control-expose-headers"] == "Location"
    assert response.json() == {"streamUrl": stream.url}
    events = list(stream.follow())
    assert text_of(events) == WORDS
    assert [events[0]["type"], events[-1]["type"]] == ["start", "finish"]


def test_mode_await_answers_at_the_end(app: str, chat_id: str, stream: Stream) -> None:
    response = httpx.post(f"{app}/api/chat", json={"id": chat_id, "mode": "await"})
    assert response.status_code == 200
    info = stream.head()
    assert info.closed
    assert response.json() == {"streamUrl": stream.url, "finalOffset": info.next_offset}


def test_a_lost_client_does_not_end_the_generation(app: str, chat_id: str, stream: Stream) -> None:
    """Two readers, one of which leaves in the middle; and the one that asked is gone from the start."""
    httpx.post(f"{app}/api/chat", json={"id": chat_id, "hold": True}).raise_for_status()
    with stream.follow() as reader:
        leaving = [next(reader) for _ in range(4)]
        offset = reader.offset
    httpx.post(f"{app}/api/chat/{chat_id}/release").raise_for_status()
    second = list(stream.follow())
    assert text_of(second) == WORDS
    assert second[: len(leaving)] == leaving
    resumed = list(stream.follow(offset))
    assert second[-len(resumed) :] == resumed


def test_the_client_can_ask_whether_there_is_something_to_resume(app: str, chat_id: str, stream: Stream) -> None:
    resume = f"{app}/api/chat/{chat_id}/stream"
    assert httpx.get(resume).status_code == 204
    httpx.post(f"{app}/api/chat", json={"id": chat_id, "hold": True}).raise_for_status()
    running = httpx.get(resume)
    assert (running.status_code, running.headers["location"]) == (200, stream.url)
    httpx.post(f"{app}/api/chat/{chat_id}/release").raise_for_status()
    assert text_of(list(stream.follow())) == WORDS
    assert httpx.get(resume).status_code == 204


def test_stop_ends_the_generation_and_says_so(app: str, chat_id: str, stream: Stream) -> None:
    httpx.post(f"{app}/api/chat", json={"id": chat_id, "hold": True}).raise_for_status()
    reader = stream.follow()
    seen = [next(reader) for _ in range(4)]
    assert httpx.post(f"{app}/api/chat/{chat_id}/stop").json() == {"stopped": True}
    seen += list(reader)
    assert seen[-1] == {"type": "abort", "reason": "the user stopped it"}
    assert 0 < len(text_of(seen)) < len(WORDS)
    assert reader.closed
    assert httpx.post(f"{app}/api/chat/{chat_id}/stop").json() == {"stopped": False}


def test_stop_works_from_another_process(server: Server, app: str, chat_id: str, stream: Stream) -> None:
    """The second application has not started the generation: it fences the writer and closes the stream."""
    with application_process(f"{server.url}/v1/stream") as elsewhere:
        httpx.post(f"{elsewhere}/api/chat", json={"id": chat_id, "hold": True}).raise_for_status()
        reader = stream.follow()
        seen = [next(reader) for _ in range(4)]
        assert httpx.post(f"{app}/api/chat/{chat_id}/stop").json() == {"stopped": True}
        httpx.post(f"{elsewhere}/api/chat/{chat_id}/release").raise_for_status()
        seen += list(reader)
        assert httpx.get(f"{elsewhere}/api/chat/{chat_id}/stream").status_code == 204
    assert [event["type"] for event in seen].count("abort") == 1
    assert seen[-1]["type"] == "abort", "nothing of the fenced writer follows"


def test_a_failing_source_ends_with_an_error_that_tells_nothing_of_the_server(
    app: str, chat_id: str, stream: Stream
) -> None:
    httpx.post(f"{app}/api/chat", json={"id": chat_id, "fail": True}).raise_for_status()
    events = list(stream.follow())
    assert events[-1] == {"type": "error", "errorText": "The answer could not be generated."}
    assert text_of(events) == WORDS[:4]
    with pytest.raises(StreamClosedError):
        stream.append({"type": "late"})


def test_a_shutdown_stops_what_runs(server: Server, chat_id: str, stream: Stream) -> None:
    with serving(f"{server.url}/v1/stream") as app:
        httpx.post(f"{app}/api/chat", json={"id": chat_id, "hold": True}).raise_for_status()
        reader = stream.follow()
        seen = [next(reader) for _ in range(3)]
    seen += list(reader)
    assert seen[-1] == {"type": "abort", "reason": "shutdown"}
