"""Following a stream as state (extensions §3.3, §3.4): bootstrap, apply, tail, and bootstrap again on 410."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeAlias

import httpx
import pytest

from headwater.client import HistoryMissing, Part, Refused, Stream, StreamMissing, follow
from tests.client.folding import SNAPSHOT_TYPE, Table
from tests.serving import Server, serve

BUCKET = "client-tests"

Connect: TypeAlias = Callable[..., Stream]


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    """A server whose event streams end every second, so that resuming is part of every test."""
    with serve(DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="1", DS_SERVER__LONG_POLL_TIMEOUT_SECS="1") as server:
        assert httpx.put(f"{server.url}/ds/{BUCKET}").status_code == 201
        yield server


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Streams by their URL, over clients that are closed behind the test."""
    with ExitStack() as stack:

        def connect(url: str, transport: httpx.BaseTransport | None = None) -> Stream:
            return Stream(url, stack.enter_context(httpx.Client(timeout=10, transport=transport, verify=False)))

        yield connect


@pytest.fixture
def stream(own: Server, request: pytest.FixtureRequest, connect: Connect) -> Stream:
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)
    return connect(f"{own.url}/ds/{BUCKET}/{name[-90:]}")


def update(number: int, key: str, value: Any) -> bytes:
    return json.dumps({"number": number, "key": key, "value": value}).encode()


def write(stream: Stream, start: int, count: int) -> str:
    offset = ""
    for number in range(start, start + count):
        offset = stream.append(update(number, f"k{number % 5}", number))
    return offset


class Texts:
    """A state that is simply all updates."""

    def __init__(self) -> None:
        self.updates: list[bytes] = []
        self.snapshots: list[bytes | None] = []

    def restore(self, snapshot: Part | None) -> None:
        self.snapshots.append(snapshot.read() if snapshot is not None else None)
        self.updates = []

    def apply(self, update: bytes) -> None:
        self.updates.append(update)


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_a_state_follows_from_the_beginning_to_the_close(stream: Stream, live: str) -> None:
    stream.create()
    write(stream, 0, 10)
    table = Table()
    for place in follow(stream, table, live=live):
        if place.restored:
            assert (place.up_to_date, table.applied) == (True, 10)
            write(stream, 10, 10)
            stream.append(b"", headers={"Stream-Closed": "true"})
        if place.closed:
            break
    assert (table.applied, table.restored) == (20, 1)
    assert table.values == {f"k{number % 5}": number for number in range(15, 20)}


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_a_state_begins_from_a_snapshot(stream: Stream, live: str) -> None:
    stream.create()
    folded = Table()
    for number in range(10):
        folded.apply(update(number, f"k{number % 5}", number))
    offset = write(stream, 0, 10)
    write(stream, 10, 5)
    stream.publish_snapshot(offset, folded.snapshot(), SNAPSHOT_TYPE)
    table = Table()
    place = next(follow(stream, table, live=live))
    assert (place.restored, table.applied) == (True, 15)
    assert place.next_offset == stream.tail()


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_a_state_that_was_overtaken_by_retention_is_built_anew(stream: Stream, live: str) -> None:
    stream.create()
    write(stream, 0, 5)
    table, folded = Table(), Table()
    places = follow(stream, table, live=live)
    assert next(places).restored
    # While nobody reads, the stream goes on and is folded behind the reader's back.
    for number in range(8):
        folded.apply(update(number, f"k{number % 5}", number))
    offset = write(stream, 5, 3)
    stream.publish_snapshot(offset, folded.snapshot(), SNAPSHOT_TYPE)
    write(stream, 8, 2)
    for place in places:
        if table.applied == 10 and place.up_to_date:
            break
    assert (table.restored, table.applied) == (2, 10)


@pytest.mark.parametrize("live", ["sse", "long-poll"])
@pytest.mark.parametrize("kind", ["application/octet-stream", "text/plain", "application/json"])
def test_every_type_comes_message_by_message(stream: Stream, kind: str, live: str) -> None:
    messages = (
        [b'"one"', b'{"a":[1,2]}', b'"\xc3\xa9"'] if kind == "application/json" else [b"one", b"two, two", b"\xc3\xa9"]
    )
    if kind == "application/octet-stream":
        messages += [bytes(range(256)), b"\r\n--x"]
    stream.create(kind)
    stream.append(messages[0], kind)
    texts = Texts()
    for place in follow(stream, texts, live=live):
        if place.restored:
            for message in messages[1:]:
                stream.append(message, kind)
        if len(texts.updates) >= len(messages):
            break
    assert texts.updates == messages
    assert texts.snapshots == [None]


def test_where_events_are_not_to_be_had_long_poll_goes_on(stream: Stream, connect: Connect) -> None:
    """A proxy that knows no events: simulated where the requests leave, the server behind it is real."""
    modes: list[str | None] = []

    class NoEventsHere(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            live = request.url.params.get("live")
            modes.append(live)
            if live == "sse":
                return httpx.Response(406, request=request)
            return super().handle_request(request)

    stream.create()
    write(stream, 0, 3)
    table = Table()
    behind = connect(stream.url, NoEventsHere())
    for place in follow(behind, table):
        if place.restored:
            write(stream, 3, 3)
        if table.applied == 6:
            break
    assert modes.count("sse") == 1
    assert "long-poll" in modes


def test_a_connection_that_breaks_is_resumed_without_gap_or_repeat(stream: Stream, connect: Connect) -> None:
    """Every third answer breaks off somewhere; the state still sees each update once."""

    class Breaking(httpx.HTTPTransport):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            self.calls += 1
            response = super().handle_request(request)
            if self.calls % 3:
                return response
            return httpx.Response(response.status_code, headers=response.headers, stream=Half(response))

    class Half(httpx.SyncByteStream):
        def __init__(self, response: httpx.Response) -> None:
            self._response = response

        def __iter__(self) -> Iterator[bytes]:
            for chunk in self._response.stream:  # type: ignore[union-attr]
                yield chunk[: len(chunk) // 2]
                raise httpx.ReadError("broken off")

        def close(self) -> None:
            self._response.close()

    stream.create()
    write(stream, 0, 50)
    table = Table()
    broken = connect(stream.url, Breaking())
    writer = threading.Thread(target=write, args=(stream, 50, 50))
    writer.start()
    for _ in follow(broken, table):
        if table.applied == 100:
            break
    writer.join()
    assert table.applied == 100


def test_what_is_not_there_is_told_at_once(own: Server, connect: Connect) -> None:
    missing = connect(f"{own.url}/ds/{BUCKET}/none")
    with pytest.raises(StreamMissing):
        next(follow(missing, Table()))
    with pytest.raises(Refused):
        missing.publish_snapshot("zzz", b"x")


def test_a_server_that_is_gone_is_given_up_after_the_retries(connect: Connect) -> None:
    with serve() as server:
        url = server.url
    with pytest.raises(httpx.TransportError):
        next(follow(connect(f"{url}/ds/{BUCKET}/x"), Table(), retries=2))


def test_a_deleted_stream_ends_the_following(stream: Stream) -> None:
    stream.create()
    write(stream, 0, 1)
    places = follow(stream, Table())
    next(places)
    assert httpx.delete(stream.url).status_code == 204
    with pytest.raises(StreamMissing):
        list(places)


def test_3_4_a_stream_whose_history_is_missing_is_not_followed_in_silence(stream: Stream) -> None:
    """Retention by size dropped messages that no snapshot covers (§3.4): what is left is not the state."""
    headers = {"Content-Type": "application/json", "Stream-Retention-Bytes": "200", "Stream-Retention-Drop": "allowed"}
    assert httpx.put(stream.url, headers=headers).status_code == 201
    write(stream, 0, 30)
    deadline = time.monotonic() + 10
    while "stream-earliest-offset" not in httpx.head(stream.url).headers:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    state = Texts()
    with pytest.raises(HistoryMissing, match="are gone"):
        next(follow(stream, state))
    assert state.snapshots == []
    assert next(follow(stream, state, allow_missing=True)).up_to_date
    assert 0 < len(state.updates) < 30
