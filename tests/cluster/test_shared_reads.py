"""Live reads of another worker's stream: the reader's worker follows it once and returns durable data in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import httpx

from headwater.cluster.followed_streams import KEPT_BYTES, FollowedStreams
from headwater.cluster.peers import Peer, Peers
from headwater.cluster.relay import Relay
from headwater.cluster.tails import UPDATE_MAX_BYTES, WINDOW_BYTES, Tails
from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.rules import CreateRequest
from headwater.engine.clock import SteadyClock
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.scheduler import LoopScheduler
from headwater.engine.stream import LiveStream
from headwater.storage.memory import MemoryStorage
from tests.cluster.workers import name_in, processes, wait_for_restart
from tests.http.sse_reader import SseReader
from tests.serving import serve

TEXT = {"Content-Type": "text/plain"}


class Pair:
    """Two workers in one process: one owns streams, the other follows them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.owner, self.other = (
            Engine(MemoryStorage(), SteadyClock(), LoopScheduler(loop), EngineLimits(), commit="inline")
            for _ in range(2)
        )
        self.peers = [Peers(0, 2), Peers(1, 2)]
        Tails(self.owner, self.peers[0], loop)
        self.followed = FollowedStreams(self.other, Relay(self.peers[1], loop, 1.0), LoopScheduler(loop))

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        for number, end in enumerate(socket.socketpair()):
            end.setblocking(False)
            peer = self.peers[number].connect(1 - number)
            await loop.create_unix_connection(partial(_itself, peer), sock=end)
            self.peers[number].connected(peer)

    def create(self, name: str) -> LiveStream:
        self.owner.create(CreateRequest(name, "text/plain", None, None, False, b""), lambda _: None)
        return self.owner.catalog.by_name[name]

    def append(self, name: str, data: bytes) -> None:
        self.owner.append(name, "text/plain", data, None, None, False, lambda _: None)


class Reader:
    """Continues reading whenever it is woken, as live readers do."""

    def __init__(self, followed: FollowedStreams, stream: LiveStream) -> None:
        self._followed = followed
        self._stream = stream
        self._at = Offset(stream.durable_index, stream.durable_position)
        self.data = b""
        self.is_gone = False
        followed.follow(stream, self)

    def wake(self) -> None:
        if self._at.message_index < self._stream.durable_retained_index:
            self.gone(Refusal("behind what is kept"))
            return
        reader = self._followed.reader
        chunk = reader.chunk(self._stream, self._at, 2**30)
        self.data += b"".join(reader.buffers(chunk))
        self._at = chunk.end

    def gone(self, refusal: Refusal) -> None:
        self.is_gone = True
        self._followed.unfollow(self._stream, self)


def _itself(peer: Peer) -> Peer:
    return peer


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  (there is no event: slices of the loop are awaited)
            await asyncio.sleep(0)


def _run(work: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        pair = Pair(asyncio.get_running_loop())
        await pair.connect()
        try:
            await work(pair)
        finally:
            for peers in pair.peers:
                for peer in peers.all():
                    peer.close()
            await asyncio.sleep(0)

    asyncio.run(main())


def test_all_readers_of_a_worker_share_one_follower_at_the_owner() -> None:
    async def work(pair: Pair) -> None:
        stream = pair.create("s")
        pair.append("s", b"before,")
        found = [await pair.followed.ready(0, "s") for _ in range(3)]
        assert found[0] is not None
        assert found[0].serves("-1", is_bucketed=False)
        readers = [Reader(pair.followed, found[0].stream) for _ in range(300)]
        for number in range(100):
            pair.append("s", b"%d," % number)
        # Acknowledged data is there when another reader starts.
        await pair.followed.ready(0, "s")
        assert stream.followers is not None
        assert len(stream.followers) == 1
        await _until(lambda: all(len(reader.data) == 290 for reader in readers))
        assert {reader.data for reader in readers} == {b"".join(b"%d," % number for number in range(100))}
        pair.owner.delete("s", lambda _: None)
        assert await pair.followed.ready(0, "s") is None
        assert all(reader.is_gone for reader in readers)

    _run(work)


def test_reader_that_starts_while_much_is_sent_to_its_worker_finds_what_was_acknowledged() -> None:
    async def work(pair: Pair) -> None:
        stream = pair.create("s")
        assert await pair.followed.ready(0, "s") is not None
        peer = pair.peers[0].get(1)
        assert peer is not None
        peer.pause_writing()
        pair.append("s", b"acknowledged")
        found = await pair.followed.ready(0, "s")
        assert found is not None
        assert found.stream.durable_index == stream.durable_index == 1
        peer.resume_writing()

    _run(work)


def test_readers_of_dropped_messages_are_not_served() -> None:
    async def work(pair: Pair) -> None:
        stream = pair.create("large")
        message = b"x" * 10_000
        for _ in range(10):
            pair.append("large", message)
        found = await pair.followed.ready(0, "large")
        assert found is not None
        kept = WINDOW_BYTES // len(message)
        assert (found.kept_index, found.serves("-1", is_bucketed=False)) == (10 - kept, False)
        assert not found.serves(f"{9 - kept:016}_{(9 - kept) * 10_000:016}", is_bucketed=False)
        assert found.serves(f"{10 - kept:016}_{(10 - kept) * 10_000:016}", is_bucketed=False)
        assert not found.serves(f"{11:016}_{110_000:016}", is_bucketed=False)
        slow = Reader(pair.followed, found.stream)
        for _ in range(2 * KEPT_BYTES // len(message)):
            pair.append("large", message)
            await pair.followed.ready(0, "large")
        assert found.kept_index > 10, "the oldest messages are dropped"
        assert len(slow.data) == stream.durable_position - 100_000, "a reader that keeps up loses nothing"
        # A message that is too large to be sent to all workers causes a gap, in which readers are not served.
        pair.append("large", b"y" * (UPDATE_MAX_BYTES + 1))
        assert await pair.followed.ready(0, "large") is found
        assert slow.is_gone
        assert (found.kept_index, found.stream.durable_index) == (stream.durable_index, stream.durable_index)

    _run(work)


def test_stream_is_unfollowed_when_its_last_reader_disconnects() -> None:
    async def work(pair: Pair) -> None:
        pair.owner.create(CreateRequest("short", "text/plain", 60, None, False, b""), lambda _: None)
        stream = pair.owner.catalog.by_name["short"]
        found = await pair.followed.ready(0, "short")
        assert found is not None
        reader = Reader(pair.followed, found.stream)
        assert stream.live_readers == 1
        pair.followed.unfollow(found.stream, reader)
        await _until(lambda: not stream.followers)
        assert stream.live_readers == 0

    _run(work)


def test_event_streams_at_every_worker_have_every_message_in_order() -> None:
    name = name_in(1, 3, "hot")
    with (
        serve(DS_SERVER__WORKERS="3", DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0") as server,
        httpx.Client(base_url=server.url) as client,
        ExitStack() as opened,
    ):
        client.put(f"/v1/stream/{name}", headers=TEXT, content=b"first;").raise_for_status()
        readers = [opened.enter_context(SseReader(server, name)) for _ in range(12)]
        for number in range(20):
            client.post(f"/v1/stream/{name}", headers=TEXT, content=b"%d;" % number).raise_for_status()
        client.post(f"/v1/stream/{name}", headers={"Stream-Closed": "true"}).raise_for_status()
        texts = {"".join(event.data for event in reader if event.kind == "data") for reader in readers}
        assert texts == {"first;" + "".join(f"{number};" for number in range(20))}


def test_delivery_lag_is_counted_by_the_worker_of_the_readers_only() -> None:
    async def work(pair: Pair) -> None:
        stream = pair.create("s")
        found = await pair.followed.ready(0, "s")
        assert found is not None
        reader = Reader(pair.followed, found.stream)
        lags = [engine.metrics.delivery_lag_seconds for engine in (pair.owner, pair.other)]
        for number in range(1, 4):
            pair.append("s", b"x")
            await _until(lambda number=number: len(reader.data) == number)  # type: ignore[misc]
            assert [sum(lag.counts) for lag in lags] == [0, number]
        assert stream.relays == 1

    _run(work)


def test_long_polls_find_what_was_acknowledged_and_survive_the_owner(tmp_path: Path) -> None:
    name = name_in(1, 2, "polled")
    with (
        serve(DS_SERVER__WORKERS="2", DS_STORAGE__MODE="file-durable", directory=tmp_path) as server,
        httpx.Client(base_url=server.url) as writer,
        ExitStack() as opened,
    ):
        writer.put(f"/v1/stream/{name}", headers=TEXT).raise_for_status()
        readers = [opened.enter_context(httpx.Client(base_url=server.url, timeout=60)) for _ in range(6)]
        offset = "-1"
        for number in range(10):
            writer.post(f"/v1/stream/{name}", headers=TEXT, content=b"%d" % number).raise_for_status()
            answers = [reader.get(f"/v1/stream/{name}?offset={offset}&live=long-poll") for reader in readers]
            assert {answer.text for answer in answers} == {str(number)}
            offset = answers[0].headers["stream-next-offset"]
        owner = processes(server)[1]
        os.kill(owner.pid, signal.SIGKILL)
        wait_for_restart(server, {owner.pid}, 2)
        with httpx.Client(base_url=server.url, timeout=60) as again:
            again.post(f"/v1/stream/{name}", headers=TEXT, content=b"after").raise_for_status()
        for reader in readers:
            # A connection of the killed worker is closed.
            with suppress(httpx.TransportError):
                assert reader.get(f"/v1/stream/{name}?offset={offset}&live=long-poll").text == "after"
        writer.delete(f"/v1/stream/{name}")
        assert httpx.get(f"{server.url}/v1/stream/{name}?offset={offset}&live=long-poll").status_code == 404
