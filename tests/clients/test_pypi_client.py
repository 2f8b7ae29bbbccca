"""The official Python client, synchronous and asynchronous, against a real server: what is written is what is read."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import pytest
from durable_streams import (
    AsyncDurableStream,
    DurableStream,
    SeqConflictError,
    StreamExistsError,
    StreamNotFoundError,
    astream,
    stream,
)

from tests.http.watching import wait_for_live_readers, wait_for_sample
from tests.offsets import offset_text
from tests.serving import Server, serve

LiveMode = Literal["long-poll", "sse"]
HOUR_S = 3600
LIVE_MODES: list[LiveMode] = ["long-poll", "sse"]


@pytest.fixture(scope="module")
def brief() -> Iterator[Server]:
    """A server that ends live responses early, so that readers must reconnect."""
    with serve(DS_SERVER__LONG_POLL_TIMEOUT_SECS="1", DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="1") as running:
        yield running


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """A server that keeps event streams open for a minute: the asynchronous client does not reconnect when they end."""
    with serve() as running:
        yield running


@pytest.fixture
def moving_server() -> Iterator[Server]:
    """A server that ends a long-poll, but no idle connection, when the test lets an hour pass."""
    with serve(
        moving_time=True,
        DS_SERVER__LONG_POLL_TIMEOUT_SECS=str(HOUR_S),
        DS_SERVER__IDLE_TIMEOUT_SECS=str(100 * HOUR_S),
    ) as running:
        yield running


@pytest.fixture
def url(brief: Server, stream_name: Callable[[], str]) -> str:
    return brief.stream_url(stream_name())


def numbers(first: int, last: int) -> list[dict[str, int]]:
    return [{"n": number} for number in range(first, last)]


def read_json(url: str) -> list[Any]:
    with stream(url, live=False) as response:
        return list(response.read_json())


def take(events: Iterator[Any], count: int) -> list[Any]:
    """The next items of a live reader, which would continue forever."""
    return [next(events) for _ in range(count)]


def test_create_head_append_read_delete(url: str) -> None:
    with DurableStream.create(url, content_type="text/plain", ttl_seconds=3600) as handle:
        assert handle.append("hello ").next_offset == offset_text(1, 6)
        assert handle.append("world").next_offset == offset_text(2, 11)
        head = handle.head()
        assert (head.content_type, head.offset) == ("text/plain", offset_text(2, 11))
        with stream(url, live=False) as response:
            assert response.read_text() == "hello world"
        handle.delete()
        with pytest.raises(StreamNotFoundError):
            handle.head()


def test_repeated_create_is_harmless_and_another_type_is_a_conflict(url: str) -> None:
    with DurableStream.create(url, content_type="application/json", body=b"[1]"):
        pass
    with DurableStream.create(url, content_type="application/json"):
        pass
    with pytest.raises(StreamExistsError):
        DurableStream.create(url, content_type="text/plain")
    assert read_json(url) == [1]


def test_missing_stream_is_not_found(url: str) -> None:
    with pytest.raises(StreamNotFoundError):
        stream(url, live=False)
    with pytest.raises(StreamNotFoundError):
        DurableStream.head_static(url)


def test_decreasing_sequence_is_refused(url: str) -> None:
    with DurableStream.create(url, content_type="text/plain", batching=False) as handle:
        handle.append("a", seq="001")
        handle.append("b", seq="002")
        with pytest.raises(SeqConflictError):
            handle.append("c", seq="001")
        with stream(url, live=False) as response:
            assert response.read_text() == "ab"


def test_appends_from_many_threads_share_requests_and_lose_nothing(url: str) -> None:
    with DurableStream.create(url, content_type="application/json") as handle:
        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(handle.append, numbers(0, 400)))
        assert {result.next_offset for result in results} >= {handle.head().offset}
    assert sorted(read_json(url), key=lambda message: message["n"]) == numbers(0, 400)


def test_json_values_are_returned_unchanged(url: str) -> None:
    values: list[Any] = [{"a": [1, 2.5, None, True]}, "text", 9007199254740993, [], [[1]], {"é": "🎈\n"}]
    with DurableStream.create(url, content_type="application/json", batching=False) as handle:
        for value in values:
            handle.append(value)
    assert read_json(url) == values


def test_every_byte_value_is_stored(url: str) -> None:
    everything = bytes(range(256))
    with DurableStream.create(url, content_type="application/octet-stream") as handle:
        handle.append(everything)
        handle.append(everything)
    with stream(url, live=False) as response:
        assert response.read_bytes() == everything * 2


def test_every_204_has_the_next_offset(url: str) -> None:
    """The client raises an error without it: for appends, repeated appends, and closes."""
    with DurableStream.create(url, content_type="text/plain", batching=False) as handle:
        producer = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "0"}
        with DurableStream(url, content_type="text/plain", headers=dict(producer), batching=False) as producing:
            first, repeat = producing.append("a"), producing.append("a")
        assert first == repeat
        with DurableStream(
            url, content_type="text/plain", headers={"Stream-Closed": "true"}, batching=False
        ) as closing:
            assert closing.append("z").next_offset == handle.head().offset


def test_reading_resumes_from_an_offset(url: str) -> None:
    with DurableStream.create(url, content_type="application/json", batching=False) as handle:
        offsets = [handle.append(message).next_offset for message in numbers(0, 10)]
    for number, at in enumerate(offsets):
        with stream(url, live=False, offset=at) as response:
            assert response.read_json() == numbers(number + 1, 10)


def in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.mark.parametrize("live", LIVE_MODES)
def test_concurrently_appended_json_arrives_once_and_in_order(url: str, live: LiveMode) -> None:
    with DurableStream.create(url, content_type="application/json", batching=False) as handle:
        for message in numbers(0, 20):
            handle.append(message)

        def write() -> None:
            for message in numbers(20, 60):
                handle.append(message)

        writer = in_background(write)
        with stream(url, offset="-1", live=live) as response:
            assert take(response.iter_json(), 60) == numbers(0, 60)
        writer.join()


@pytest.mark.parametrize("live", LIVE_MODES)
def test_text_arrives_live_and_unchanged(url: str, live: LiveMode) -> None:
    pieces = ["one\ntwo\n", " leading", "🎈", "\n\n", "\u2028", "end "]
    with DurableStream.create(url, content_type="text/plain", batching=False) as handle:

        def write() -> None:
            for piece in pieces:
                handle.append(piece)

        writer = in_background(write)
        with stream(url, offset="-1", live=live) as response:
            got = ""
            for text in response.iter_text():
                got += text
                if len(got) >= len("".join(pieces)):
                    break
        writer.join()
    assert got == "".join(pieces)


def test_bytes_arrive_live_by_long_poll(url: str) -> None:
    everything = bytes(range(256))
    with DurableStream.create(url, content_type="application/octet-stream", batching=False) as handle:

        def write() -> None:
            for _ in range(5):
                handle.append(everything)

        writer = in_background(write)
        got = b""
        with stream(url, offset="-1", live="long-poll") as response:
            for piece in response:
                got += piece
                if len(got) >= 5 * 256:
                    break
        writer.join()
    assert got == everything * 5


@pytest.mark.parametrize("live", LIVE_MODES)
def test_events_carry_the_offset_to_resume_from(url: str, live: LiveMode) -> None:
    got: list[Any] = []
    at = "-1"
    with DurableStream.create(url, content_type="application/json", batching=False) as handle:
        for life in range(3):
            for message in numbers(life * 10, life * 10 + 10):
                handle.append(message)
            with stream(url, offset=at, live=live) as response:
                for event in response.iter_events(mode="json"):
                    got += event.data if isinstance(event.data, list) else [event.data]
                    at = event.next_offset
                    if len(got) >= life * 10 + 10:
                        break
    assert got == numbers(0, 30)


def test_long_poll_reader_survives_the_servers_timeouts(moving_server: Server, stream_name: Callable[[], str]) -> None:
    url = moving_server.stream_url(stream_name())
    with DurableStream.create(url, content_type="application/json", batching=False) as handle:

        def write() -> None:
            for message in numbers(0, 3):
                wait_for_live_readers(moving_server, "long-poll", 1)
                moving_server.pass_time(HOUR_S)
                wait_for_sample(moving_server, "requests_total{operation=long-poll,status=204}", message["n"] + 1)
                wait_for_live_readers(moving_server, "long-poll", 1)
                handle.append(message)

        writer = in_background(write)
        with stream(url, offset="-1", live="long-poll") as response:
            assert take(response.iter_json(), 3) == numbers(0, 3)
        writer.join()


def test_the_asynchronous_client_creates_appends_and_reads(url: str) -> None:
    async def scenario() -> None:
        async with await AsyncDurableStream.create(url, content_type="application/json") as handle:
            results = await asyncio.gather(*(handle.append(message) for message in numbers(0, 200)))
            head = await handle.head()
            assert results[-1].next_offset == head.offset
            async with astream(url, live=False) as response:
                assert await response.read_json() == numbers(0, 200)
            await handle.delete()
            with pytest.raises(StreamNotFoundError):
                await handle.head()

    asyncio.run(scenario())


@pytest.mark.parametrize("live", LIVE_MODES)
def test_the_asynchronous_client_reads_live(patient: Server, stream_name: Callable[[], str], live: LiveMode) -> None:
    url = patient.stream_url(stream_name())

    async def scenario() -> list[Any]:
        async with await AsyncDurableStream.create(url, content_type="application/json", batching=False) as handle:

            async def write() -> None:
                for message in numbers(0, 40):
                    await handle.append(message)

            writing = asyncio.create_task(write())
            got: list[Any] = []
            async with astream(url, offset="-1", live=live) as response:
                async for message in response.iter_json():
                    got.append(message)
                    if len(got) == 40:
                        break
            await writing
            return got

    assert asyncio.run(scenario()) == numbers(0, 40)


def test_requests_of_the_client_follow_the_protocol(url: str) -> None:
    with DurableStream.create(url, content_type="application/json", batching=False) as handle:
        handle.append({"n": 1})
        handle.append([1, 2])
    read = httpx.get(url)
    assert json.loads(read.content) == [{"n": 1}, [1, 2]]
    assert read.headers["stream-up-to-date"] == "true"
