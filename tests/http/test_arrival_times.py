"""Times of messages as described in docs/extensions.md: `since` for reads and HEAD, `times` for frames."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from headwater.core.expiry import format_instant
from tests.http.protocol import Stream, assert_problem, offset
from tests.http.sse_reader import SseReader
from tests.serving import Server, serve

HOUR_MS = 3_600_000


@pytest.fixture(scope="module", params=["memory", "file-durable", "acid"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("data")
    with serve(moving_time=True, DS_STORAGE__MODE=request.param, DS_STORAGE__DATA_DIR=str(directory)) as running:
        yield running


@pytest.fixture
def hourly(server: Server, request: pytest.FixtureRequest) -> Iterator[tuple[Stream, list[int]]]:
    """A stream with three messages an hour apart, and their times."""
    with httpx.Client(base_url=server.url) as http:
        stream = Stream(http, request.node.name.replace("[", "-").replace("]", "")).create()
        times = []
        for number in range(3):
            stream.append(f"message {number}")
            times.append(last_write_ms(stream))
            server.pass_time(3600)
        yield stream, times


def last_write_ms(stream: Stream) -> int:
    return round(datetime.fromisoformat(stream.head().headers["stream-last-write-at"]).timestamp() * 1000)


def data_of(events: SseReader) -> str:
    return "".join(event.data for event in events.until_up_to_date() if event.kind == "data")


def timed_frames(response: httpx.Response) -> list[tuple[int, bytes]]:
    """The messages of a frames body with times, each with its time."""
    assert response.headers["stream-frame-times"] == "1"
    body = response.content
    (count,) = struct.unpack_from("<I", body)
    lengths = struct.unpack_from(f"<{count}I", body, 4)
    times = struct.unpack_from(f"<{count}Q", body, 4 + 4 * count)
    at = 4 + 12 * count
    messages = []
    for at_ms, length in zip(times, lengths, strict=True):
        messages.append((at_ms, body[at : at + length]))
        at += length
    assert at == len(body)
    return messages


def test_read_since_a_time_begins_with_the_first_message_that_arrived_then(
    hourly: tuple[Stream, list[int]],
) -> None:
    stream, times = hourly
    assert stream.get(since=str(times[1])).text == "message 1message 2"
    assert stream.get(since=format_instant(times[1])).text == "message 1message 2"
    assert stream.get(since=str(times[1] + 1)).text == "message 2"
    assert stream.get(since="0").text == "message 0message 1message 2"
    assert stream.get(since="1969-12-31T23:00:00-01:00").text == "message 0message 1message 2"
    later = stream.get(since=str(times[2] + HOUR_MS // 2))
    assert (later.text, later.headers["stream-since-offset"]) == ("", stream.tail())
    assert later.headers["stream-up-to-date"] == "true"


def test_head_with_since_returns_the_offset_of_a_time(hourly: tuple[Stream, list[int]]) -> None:
    stream, times = hourly
    found = stream.http.head(stream.path, params={"since": str(times[1])}).headers
    assert found["stream-since-offset"].startswith(offset(1, 9))
    assert found["stream-next-offset"] == stream.tail()
    assert stream.get(offset=found["stream-since-offset"]).text == "message 1message 2"
    assert "stream-since-offset" not in stream.head().headers


def test_live_reads_begin_at_a_time(hourly: tuple[Stream, list[int]], server: Server) -> None:
    stream, times = hourly
    assert stream.get(since=str(times[2]), live="long-poll").text == "message 2"
    with SseReader(server, stream.name, since=str(times[1])) as events:
        assert data_of(events) == "message 1message 2"
        assert events.header("stream-since-offset") is not None


def test_last_event_id_takes_precedence_over_since(hourly: tuple[Stream, list[int]], server: Server) -> None:
    stream, times = hourly
    at = stream.http.head(stream.path, params={"since": str(times[2])}).headers["stream-since-offset"]
    with SseReader(server, stream.name, since=str(times[0]), headers={"Last-Event-ID": at}) as events:
        assert data_of(events) == "message 2"


def test_frames_with_times_have_the_time_of_every_message(hourly: tuple[Stream, list[int]]) -> None:
    stream, times = hourly
    found = timed_frames(stream.get(offset="-1", frames="1", times="1"))
    assert [message for _, message in found] == [b"message 0", b"message 1", b"message 2"]
    assert [at_ms for at_ms, _ in found] == times
    part = timed_frames(stream.get(since=str(times[1]), frames="1", times="1"))
    assert part == found[1:]
    assert timed_frames(stream.get(offset=stream.tail(), until=stream.tail(), frames="1", times="1")) == []


def test_fork_has_the_times_of_its_source(hourly: tuple[Stream, list[int]], server: Server) -> None:
    stream, times = hourly
    fork = Stream(stream.http, f"{stream.name}-fork")
    fork.create(headers={"Stream-Forked-From": stream.path, "Stream-Fork-Offset": offset(2, 18)})
    server.pass_time(3600)
    fork.append("own")
    found = timed_frames(fork.get(offset="-1", frames="1", times="1"))
    assert [at_ms for at_ms, _ in found] == [*times[:2], last_write_ms(fork)]
    assert fork.get(since=str(times[1])).text == "message 1own"
    assert fork.get(since=str(times[1] + 1)).text == "own"
    deeper = Stream(stream.http, f"{stream.name}-deeper")
    deeper.create("deep", headers={"Stream-Forked-From": fork.path, "Stream-Fork-Offset": offset(1, 9)})
    assert deeper.get(since=str(times[0])).text == "message 0deep"
    assert deeper.get(since=str(times[0] + 1)).text == "deep"


def test_messages_of_one_append_have_the_same_time(server: Server) -> None:
    with httpx.Client(base_url=server.url) as http:
        stream = Stream(http, "batches", "application/json").create("[1,2]")
        first = last_write_ms(stream)
        server.pass_time(60)
        stream.append("[3,4,5]")
        found = timed_frames(stream.get(offset="-1", frames="1", times="1"))
        assert [at_ms for at_ms, _ in found] == [first] * 2 + [last_write_ms(stream)] * 3
        assert stream.get(since=str(first + 1)).json() == [3, 4, 5]


def test_since_does_not_reach_what_retention_dropped(server: Server) -> None:
    with httpx.Client(base_url=server.url) as http:
        stream = Stream(http, "dropping")
        stream.create(headers={"Stream-Retention-Bytes": "100", "Stream-Retention-Drop": "allowed"})
        for number in range(40):
            stream.append(f"message {number:03d}")
        server.pass_time(3600)
        earliest = stream.head().headers["stream-earliest-offset"]
        found = stream.get(since="0")
        assert found.headers["stream-since-offset"] == earliest
        assert found.text.endswith("message 039")


def test_invalid_times_are_400(server: Server) -> None:
    with httpx.Client(base_url=server.url) as http:
        stream = Stream(http, "invalid").create("x")
        for text in ("", "yesterday", "-5", "2026-13-01T00:00:00Z", "2026-01-01T00:00:00 02:00", "1" * 16):
            assert_problem(stream.get(since=text), 400, "bad_request")
        assert_problem(stream.get(since="0", offset="-1"), 400, "bad_request")
        assert_problem(stream.get(since="0", live="sse", frames="1"), 400, "bad_request")
        assert_problem(stream.get(offset="-1", times="1"), 400, "bad_request")
        assert_problem(stream.get(offset="-1", frames="1", times="2"), 400, "bad_request")
        assert http.head(stream.path, params={"since": "soon"}).status_code == 400


@contextmanager
def served(data: str, mode: str, *, moving_time: bool = False) -> Iterator[tuple[Server, httpx.Client]]:
    with (
        serve(moving_time=moving_time, DS_STORAGE__MODE=mode, DS_STORAGE__DATA_DIR=data) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        yield server, http


def test_times_survive_restarts_checkpoints_and_a_clock_that_is_set_back(tmp_path: Path) -> None:
    for mode in ("file-durable", "acid"):
        data = str(tmp_path / mode)
        with served(data, mode, moving_time=True) as (server, http):
            stream = Stream(http, "s").create("old")
            server.pass_time(24 * 3600)
            stream.append("future")
            before = timed_frames(stream.get(offset="-1", frames="1", times="1"))
            assert server.stop() == 0
        with served(data, mode) as (_, http):
            # The clock of this server is a day behind.
            stream = Stream(http, "s")
            assert timed_frames(stream.get(offset="-1", frames="1", times="1")) == before
            stream.append("now")
            after = timed_frames(stream.get(offset="-1", frames="1", times="1"))
            assert after == [*before, (before[-1][0], b"now")], "times never decrease"
            assert before[-1][0] > datetime.now(UTC).timestamp() * 1000
