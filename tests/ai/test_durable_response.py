"""`durable_response` with FastAPI and uvicorn: the contract, and what reloads, stops, failures and shutdowns leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from bench.servers import official_node

from headwater.ai import AG_UI, Generation, stop_generation
from headwater.client import AsyncStream, LeaseNotFoundError, LeaseUnsupportedError, Stream, StreamClosedError
from tests.ai.processes import WORDS, application_process, serving
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


def test_stop_ends_the_generation_with_a_stop_event(app: str, chat_id: str, stream: Stream) -> None:
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


def test_a_turn_of_a_conversation_is_stopped_from_another_process_and_the_conversation_continues(
    server: Server, chat_id: str
) -> None:
    """The model of the turn is silent: its process learns of the stop when it renews its lease."""
    url = server.stream_url(f"sessions/{chat_id}")

    def ask(app: str, number: int, **query: str) -> None:
        question = {"id": f"q{number}", "role": "user", "parts": [{"type": "text", "content": "Who?"}]}
        asked = httpx.post(f"{app}/api/session", params={"id": chat_id, **query}, json={"messages": [question]})
        assert asked.status_code == 201

    async def stop() -> bool:
        async with AsyncStream(url) as stream:
            return await stop_generation(stream, "enough", event_format=AG_UI, close=False)

    with application_process(f"{server.url}/v1/stream", AI_TEST_LEASE_S="1.5") as elsewhere, Stream(url) as stream:
        ask(elsewhere, 1, hold="")
        reader = stream.follow()
        while next(reader).get("delta") != "stream ":
            pass
        assert asyncio.run(stop())
        assert next(reader) == {"type": "RUN_ERROR", "message": "enough", "code": "stopped"}
        with pytest.raises(LeaseNotFoundError):
            stream.lease()
        assert not asyncio.run(stop()), "nothing is written any more"
        ask(elsewhere, 2)
        said = []
        while (event := next(reader))["type"] != "TEXT_MESSAGE_END" or not event["messageId"].startswith("answer"):
            said.append(event.get("delta", "").strip())
        assert [word for word in said if word in WORDS] == WORDS
        assert not stream.head().closed


def test_failing_source_ends_with_an_error_without_server_details(app: str, chat_id: str, stream: Stream) -> None:
    httpx.post(f"{app}/api/chat", json={"id": chat_id, "fail": True}).raise_for_status()
    events = list(stream.follow())
    assert events[-1] == {"type": "error", "errorText": "The answer could not be generated."}
    assert text_of(events) == WORDS[:4]
    with pytest.raises(StreamClosedError):
        stream.append({"type": "late"})


def test_shutdown_stops_running_generations(server: Server, chat_id: str, stream: Stream) -> None:
    with serving(f"{server.url}/v1/stream") as app:
        httpx.post(f"{app}/api/chat", json={"id": chat_id, "hold": True}).raise_for_status()
        reader = stream.follow()
        seen = [next(reader) for _ in range(3)]
    seen += list(reader)
    assert seen[-1] == {"type": "abort", "reason": "shutdown"}


def test_a_crash_of_the_application_is_an_error_for_readers(server: Server, chat_id: str, stream: Stream) -> None:
    """The process is killed in the middle of an answer; the server ends the stream when its lease expires."""
    with application_process(f"{server.url}/v1/stream", AI_TEST_LEASE_S="2") as app:
        httpx.post(f"{app}/api/chat", json={"id": chat_id, "hold": True}).raise_for_status()
        reader = stream.follow()
        seen = [next(reader) for _ in range(4)]
    seen += list(reader)
    assert seen[-1] == {"type": "error", "errorText": "The answer could not be generated."}
    assert reader.closed
    with pytest.raises(StreamClosedError):
        stream.append({"type": "late"})


async def silent(closed: asyncio.Event) -> AsyncIterator[dict[str, str]]:
    """A source that waits for its model."""
    yield {"type": "start"}
    try:
        await asyncio.Event().wait()
    finally:
        closed.set()


def test_a_silent_generation_renews_its_lease_and_ends_when_another_writer_takes_it(
    server: Server, chat_id: str
) -> None:
    async def generate() -> None:
        closed = asyncio.Event()
        async with AsyncStream(server.stream_url(f"answers/{chat_id}")) as stream:
            generation = Generation(silent(closed), stream, lease_s=6)
            await generation.start()
            before = (await stream.lease()).expires_in_s
            while (left := (await stream.lease()).expires_in_s) <= before:
                before = left
                await asyncio.sleep(0.05)
            await stream.acquire_lease("another", take_over=True)
            await generation.wait()
            assert closed.is_set()
            assert generation.outcome == "replaced"
            await stream.release_lease("another")
            assert not (await stream.head()).closed

    asyncio.run(generate())


def test_a_server_without_leases_is_used_without_them(chat_id: str) -> None:
    async def source() -> AsyncIterator[dict[str, str]]:
        yield {"type": "finish"}

    async def generate(url: str) -> None:
        async with AsyncStream(f"{url}/v1/stream/{chat_id}") as stream:
            generation = Generation(source(), stream)
            await generation.start()
            await generation.wait()
            assert generation.outcome == "finished"
            assert [event async for event in stream.follow()] == [{"type": "finish"}]
        async with AsyncStream(f"{url}/v1/stream/{chat_id}-open") as stream:
            await stream.create()
            with pytest.raises(LeaseUnsupportedError):
                await stream.acquire_lease("w")

    with official_node() as node:
        asyncio.run(generate(node.url))
