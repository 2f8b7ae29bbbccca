"""Following a stream as state (extensions §3.3, §3.4): bootstrap, apply, follow, and bootstrap again on 410."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headwater.client import (
    Client,
    ConnectError,
    HistoryMissingError,
    ResponseError,
    Retry,
    Snapshot,
    Stream,
    StreamNotFoundError,
)
from headwater.client.reading import Live
from tests.client.folding import SNAPSHOT_TYPE, Table
from tests.client.proxies import Breaking, WithoutEvents, running
from tests.serving import Server, serve
from tests.waiting import wait_until

BUCKET = "client-tests"


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    """A server whose event streams end every second, so that resuming is part of every test."""
    with serve(DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="1", DS_SERVER__LONG_POLL_TIMEOUT_SECS="1") as server:
        assert httpx.put(f"{server.url}/ds/{BUCKET}").status_code == 201
        yield server


@pytest.fixture
def stream(own: Server, request: pytest.FixtureRequest) -> Iterator[Stream]:
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)
    with Stream(f"{own.url}/ds/{BUCKET}/{name[-90:]}") as stream:
        yield stream


def update(number: int, key: str, value: Any) -> bytes:
    return json.dumps({"number": number, "key": key, "value": value}).encode()


def write(stream: Stream, start: int, count: int) -> str:
    offset = ""
    for number in range(start, start + count):
        offset = stream.append(update(number, f"k{number % 5}", number)).next_offset
    return offset


class Texts:
    """A state that is the list of all updates."""

    def __init__(self) -> None:
        self.updates: list[bytes] = []
        self.snapshots: list[bytes | None] = []

    def restore(self, snapshot: Snapshot | None) -> None:
        self.snapshots.append(snapshot.body if snapshot is not None else None)
        self.updates = []

    def apply(self, update: bytes) -> None:
        self.updates.append(update)


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_a_state_follows_from_the_beginning_to_the_close(stream: Stream, live: Live) -> None:
    stream.create()
    write(stream, 0, 10)
    table = Table()
    for progress in stream.follow_state(table, live=live):
        if progress.restored:
            assert (progress.up_to_date, table.applied) == (True, 10)
            write(stream, 10, 10)
            stream.close()
        if progress.closed:
            break
    assert (table.applied, table.restored) == (20, 1)
    assert table.values == {f"k{number % 5}": number for number in range(15, 20)}


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_state_starts_from_a_snapshot(stream: Stream, live: Live) -> None:
    stream.create()
    folded = Table()
    for number in range(10):
        folded.apply(update(number, f"k{number % 5}", number))
    offset = write(stream, 0, 10)
    write(stream, 10, 5)
    stream.publish_snapshot(offset, folded.snapshot(), SNAPSHOT_TYPE)
    table = Table()
    progress = next(stream.follow_state(table, live=live))
    assert (progress.restored, table.applied) == (True, 15)
    assert progress.next_offset == stream.head().next_offset


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_state_overtaken_by_retention_is_rebuilt(stream: Stream, live: Live) -> None:
    stream.create()
    write(stream, 0, 5)
    table, folded = Table(), Table()
    steps = stream.follow_state(table, live=live)
    assert next(steps).restored
    # While there are no readers, the stream grows and is folded.
    for number in range(8):
        folded.apply(update(number, f"k{number % 5}", number))
    offset = write(stream, 5, 3)
    stream.publish_snapshot(offset, folded.snapshot(), SNAPSHOT_TYPE)
    write(stream, 8, 2)
    for progress in steps:
        if table.applied == 10 and progress.up_to_date:
            break
    assert (table.restored, table.applied) == (2, 10)


@pytest.mark.parametrize("live", ["sse", "long-poll"])
@pytest.mark.parametrize("kind", ["application/octet-stream", "text/plain", "application/json"])
def test_every_type_is_emitted_message_by_message(stream: Stream, kind: str, live: Live) -> None:
    messages = (
        [b'"one"', b'{"a":[1,2]}', b'"\xc3\xa9"'] if kind == "application/json" else [b"one", b"two, two", b"\xc3\xa9"]
    )
    if kind == "application/octet-stream":
        messages += [bytes(range(256)), b"\r\n--x"]
    stream.create(kind)
    stream.append(messages[0])
    texts = Texts()
    for progress in stream.follow_state(texts, live=live):
        if progress.restored:
            for message in messages[1:]:
                stream.append(message)
        if len(texts.updates) >= len(messages):
            break
    assert texts.updates == messages
    assert texts.snapshots == [None]


def test_without_events_the_reader_falls_back_to_long_poll(own: Server, stream: Stream) -> None:
    stream.create()
    write(stream, 0, 3)
    table = Table()
    with (
        running(WithoutEvents(own.url)) as proxy,
        Stream(stream.url.replace(own.url, proxy.url)) as behind,
    ):
        for progress in behind.follow_state(table):
            if progress.restored:
                write(stream, 3, 3)
            if table.applied == 6:
                break
    asked = [line for line in proxy.requests if "live=" in line]
    assert sum("live=sse" in line for line in asked) == 1
    assert any("live=long-poll" in line for line in asked)


def test_broken_connection_is_resumed_without_gap_or_repeat(own: Server, stream: Stream) -> None:
    """One in three responses is cut; the state still sees each update once."""
    stream.create()
    write(stream, 0, 50)
    table = Table()
    proxy = Breaking(own.url)
    writer = threading.Thread(target=write, args=(stream, 50, 50))
    writer.start()
    retry = Retry(timeout_s=60, first_delay_s=0.01, max_delay_s=0.05)
    with running(proxy), Stream(stream.url.replace(own.url, proxy.url), retry=retry) as broken:
        for _ in broken.follow_state(table):
            if table.applied == 100:
                break
    writer.join()
    assert table.applied == 100
    assert proxy.cuts


def test_missing_stream_is_an_immediate_error(own: Server) -> None:
    with Client(own.url) as client:
        missing = client.bucket(BUCKET).stream("none")
        with pytest.raises(StreamNotFoundError):
            next(missing.follow_state(Table()))
        with pytest.raises(ResponseError):
            missing.publish_snapshot("zzz", b"x")


def test_an_unreachable_server_is_an_error_after_the_retries() -> None:
    with serve() as server:
        url = server.url
    with (
        Stream(f"{url}/ds/{BUCKET}/x", retry=Retry(attempts=2, first_delay_s=0.01)) as stream,
        pytest.raises(ConnectError),
    ):
        next(stream.follow_state(Table()))


def test_a_deleted_stream_ends_the_following(stream: Stream) -> None:
    stream.create()
    write(stream, 0, 1)
    steps = stream.follow_state(Table())
    next(steps)
    stream.delete()
    with pytest.raises(StreamNotFoundError):
        list(steps)


def test_3_4_missing_history_is_an_error(stream: Stream) -> None:
    """Retention by size dropped messages that no snapshot covers (§3.4), so the state cannot be built."""
    headers = {"Content-Type": "application/json", "Stream-Retention-Bytes": "200", "Stream-Retention-Drop": "allowed"}
    assert httpx.put(stream.url, headers=headers).status_code == 201
    write(stream, 0, 30)
    wait_until(lambda: "stream-earliest-offset" in httpx.head(stream.url).headers)
    state = Texts()
    with pytest.raises(HistoryMissingError, match="were deleted and no snapshot covers them"):
        next(stream.follow_state(state))
    assert state.snapshots == []
    assert next(stream.follow_state(state, allow_missing=True)).up_to_date
    assert 0 < len(state.updates) < 30
