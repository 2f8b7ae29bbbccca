"""A response reaches the request that it belongs to, whatever happens to the connection between two workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from headwater.cluster import frames, messages
from headwater.cluster.peers import Peer, TunnelClient
from headwater.cluster.relay import Exchange
from tests.cluster.links import Link, LinkedWorkers, linked_workers
from tests.cluster.workers import name_in
from tests.waiting import connections_idle

CUTS = 3
THERE = [name_in(1, 2, prefix) for prefix in ("a", "b", "c")]
"""Streams of worker 1. Clients connect to worker 0."""


def _run(test: Callable[[LinkedWorkers], Awaitable[None]], **server: float) -> None:
    async def run() -> None:
        async with linked_workers(workers=2, **server) as workers:
            await test(workers)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(run(), 300))


async def _create(workers: LinkedWorkers, *names: str, size: int = 0) -> None:
    """Create streams whose content tells which of them it is."""
    client = await workers.client()
    for name in names:
        status, _ = await client.ask("PUT", name, f"content of {name}".encode().ljust(size))
        assert status == 201
    client.close()


def _producer(name: str, sequence: int = 0) -> dict[str, str]:
    return {"Producer_Id": name, "Producer_Epoch": "0", "Producer_Seq": str(sequence)}


async def _append(workers: LinkedWorkers, name: str, producer: str) -> int | None:
    """Append the first message of a producer; None if the connection was closed without a response."""
    client = await workers.client()
    try:
        status, _ = await client.ask("POST", name, f"<{producer}>".encode(), **_producer(producer))
        return status
    except ConnectionError:
        return None
    finally:
        client.close()


async def _read(workers: LinkedWorkers, name: str) -> tuple[int, bytes]:
    client = await workers.client()
    try:
        return await client.ask("GET", name)
    finally:
        client.close()


async def _read_again(workers: LinkedWorkers, name: str) -> bytes:
    """Read a stream, again if the connection is closed in the middle of a large response, or the read is cut twice."""
    while True:
        try:
            status, found = await _read(workers, name)
        except ConnectionError:
            continue
        if status == 503:
            assert b"worker_unavailable" in found
            continue
        assert status == 200
        return found


def test_requests_relayed_while_their_worker_begins_to_drain_get_their_own_responses() -> None:
    async def test(workers: LinkedWorkers) -> None:
        await _create(workers, *THERE)
        assert workers.link is not None
        clients = [await workers.client() for _ in THERE]
        assert await clients[0].ask("GET", THERE[0]) == (200, f"content of {THERE[0]}".encode())
        workers.link.flows[0].clear()
        clients[1].send("GET", THERE[1])
        await connections_idle()
        workers.send(1, messages.Drain())
        await connections_idle()
        clients[2].send("GET", THERE[2])
        await connections_idle()
        workers.link.flows[0].set()
        for name, client in list(zip(THERE, clients, strict=True))[1:]:
            assert await client.receive() == (200, f"content of {name}".encode())

    _run(test)


def test_connection_that_is_handed_over_to_a_draining_worker_gets_its_response() -> None:
    async def test(workers: LinkedWorkers) -> None:
        await _create(workers, *THERE)
        await workers.connect(Link(), can_move=True)
        await connections_idle()
        workers.send(1, messages.Drain())
        await connections_idle()
        assert await _append(workers, THERE[0], "p") == 200
        assert await _read(workers, THERE[0]) == (200, f"content of {THERE[0]}<p>".encode())

    _run(test)


def test_request_for_a_process_that_does_not_have_the_stream_is_relayed_twice_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner follows from the name, and a process that is asked for a placed stream relays it to nobody."""
    hops: list[int] = []
    begin = Peer.begin

    def count(peer: Peer, client: TunnelClient, kind: int, origin: bytes, data: bytes) -> int:
        hops.append(kind & ~frames.AHEAD)
        return begin(peer, client, kind, origin, data)

    async def test(workers: LinkedWorkers) -> None:
        monkeypatch.setattr(Peer, "begin", count)
        source, here, missing = THERE[0], name_in(0, 2, "here"), name_in(0, 2, "missing")
        fork = name_in(0, 2, "fork")
        await _create(workers, source, here)
        client = await workers.client()
        # It is stored where its source is.
        assert (await client.ask("PUT", fork, Stream_Forked_From=f"/v1/stream/{source}"))[0] == 201
        client.close()
        peer = workers.workers[0]._peers.get(1)
        assert peer is not None

        async def hops_of(method: str, name: str, kind: int) -> tuple[int, list[int]]:
            hops.clear()
            data = f"{method} /v1/stream/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            response, _ = await Exchange(peer, data, kind).response
            return int(response.split(b" ")[1]), list(hops)

        wrong = frames.BEGIN
        placed = frames.BEGIN_PLACED
        assert await hops_of("GET", here, wrong) == (200, [wrong, frames.BEGIN])
        assert await hops_of("GET", missing, wrong) == (404, [wrong, frames.BEGIN])
        assert await hops_of("GET", fork, wrong) == (200, [wrong, frames.BEGIN, frames.BEGIN_PLACED])
        assert await hops_of("GET", here, placed) == (404, [placed])
        assert await hops_of("GET", missing, placed) == (404, [placed])
        # The owner of the name still believes that the other worker has the stream.
        assert (await hops_of("DELETE", fork, placed))[0] == 204
        assert await hops_of("GET", fork, wrong) == (404, [wrong, frames.BEGIN, frames.BEGIN_PLACED])

    _run(test)


def test_response_of_a_replaced_connection_is_dropped() -> None:
    async def test(workers: LinkedWorkers) -> None:
        await _create(workers, *THERE)
        old = workers.link
        assert old is not None
        old.flows[1].clear()
        first = await workers.client()
        first.send("GET", THERE[0])
        append = asyncio.create_task(_append(workers, THERE[1], "p"))
        await connections_idle()
        await workers.connect(Link())
        other = asyncio.create_task(_read(workers, THERE[2]))
        old.flows[1].set()
        # The read is repeated over the new connection. The append is not: it may have been performed, and was.
        assert await first.receive() == (200, f"content of {THERE[0]}".encode())
        assert await append is None
        assert await other == (200, f"content of {THERE[2]}".encode())
        assert await _read(workers, THERE[1]) == (200, f"content of {THERE[1]}<p>".encode())
        assert await _append(workers, THERE[1], "p") == 204
        await old.cut()

    _run(test)


def test_connection_cut_at_any_byte_mixes_up_no_response_and_repeats_no_write(long: bool) -> None:
    async def round_trip(workers: LinkedWorkers, producer: str, link: Link) -> int | None:
        """Two reads and an append over a new link, which is replaced once it is cut."""
        await workers.connect(link)
        reads = [asyncio.create_task(_read(workers, name)) for name in (THERE[0], THERE[2])]
        append = asyncio.create_task(_append(workers, THERE[1], producer))
        asked = asyncio.gather(append, *reads)
        append.add_done_callback(lambda _: link.is_cut.set())
        await link.is_cut.wait()
        await link.cut()
        await workers.connect(Link())
        await asked
        for name, read in zip((THERE[0], THERE[2]), reads, strict=True):
            assert read.result() == (200, f"content of {name}".encode())
        return append.result()

    async def test(workers: LinkedWorkers) -> None:
        await _create(workers, *THERE)
        whole = Link()
        assert await round_trip(workers, "whole", whole) == 200
        statuses = set()
        for direction in range(2):
            step = 1 if long else 11
            for at in range(1, whole.passed[direction] + step, step):
                producer = f"p{direction}.{at}"
                limits = (at, None) if direction == 0 else (None, at)
                status = await round_trip(workers, producer, Link(limits=limits))
                repeated = await _append(workers, THERE[1], producer)
                assert (status, repeated) in ((200, 204), (None, 204), (None, 200)), (direction, at)
                statuses.add((status, repeated))
                _, content = await _read(workers, THERE[1])
                assert content.count(f"<{producer}>".encode()) == 1, (direction, at)
        assert statuses == {(200, 204), (None, 204), (None, 200)}

    _run(test, worker_wait_secs=30)


def test_reader_of_a_deleted_stream_gets_no_data_of_its_successor() -> None:
    """Also if the successor exists before the reader's worker knows of the deletion."""

    async def test(workers: LinkedWorkers) -> None:
        await _create(workers, THERE[0])
        assert workers.link is not None
        reader, writer = await workers.client(), await workers.client(1)
        reader.send("GET", f"{THERE[0]}?offset=now&live=long-poll")
        while 'live_readers{kind="long-poll"} 1' not in await workers.metrics():
            pass
        workers.link.flows[1].clear()
        assert (await writer.ask("DELETE", THERE[0]))[0] == 204
        assert (await writer.ask("PUT", THERE[0], b"other data"))[0] == 201
        workers.link.flows[1].set()
        status, body = await reader.receive()
        assert status == 404, body

    _run(test, long_poll_timeout_secs=2)


def test_pieces_cancels_and_cuts_in_any_order_mix_up_no_response(long: bool) -> None:
    large = [name_in(1, 2, prefix) for prefix in ("large", "huge")]
    generator = random.Random(17)
    requests = 300 if long else 30

    async def client(workers: LinkedWorkers, number: int, mine: str, counts: dict[str, int]) -> None:
        """Ask for this client's own stream and for shared ones, and disconnect in the middle now and then."""
        connection = await workers.client()
        written: list[bytes] = []
        for sequence in range(100 * requests):
            # How many requests there are between two cuts depends on the machine.
            if sequence >= requests and counts["cuts"] >= CUTS:
                break
            choice = generator.random()
            try:
                if choice < 0.1:
                    connection.send("GET", generator.choice(large))
                    await asyncio.sleep(generator.random() * 0.01)
                    raise ConnectionError("the client disconnects")
                if choice < 0.5:
                    name = generator.choice([*THERE, *large])
                    status, found = await connection.ask("GET", name)
                    while status == 503:
                        assert b"worker_unavailable" in found, "it was cut twice"
                        status, found = await connection.ask("GET", name)
                    assert (status, found.rstrip()) == (200, f"content of {name}".encode())
                else:
                    message = f"<{number}.{sequence}>".encode().ljust(100_000 if choice > 0.97 else 20)
                    written.append(message)
                    status, _ = await connection.ask("POST", mine, message, **_producer(f"{number}.{sequence}"))
                    assert status == 200
                    counts["acknowledged"] += 1
            except ConnectionError:
                counts["closed"] += 1
                connection.close()
                connection = await workers.client()
                if choice >= 0.5:
                    found = await _read_again(workers, mine)
                    if not found.endswith(written[-1]):
                        written.pop()
        found = await _read_again(workers, mine)
        assert found == f"content of {mine}".encode() + b"".join(written)

    async def test(workers: LinkedWorkers) -> None:
        mine = [name_in(1, 2, f"mine{number}-") for number in range(8)]
        await _create(workers, *THERE, *mine)
        await _create(workers, *large, size=200_000)
        counts = {"acknowledged": 0, "closed": 0, "cuts": 0}

        async def replace_links() -> None:
            while True:
                link = Link(seed=counts["cuts"])
                await workers.connect(link)
                await asyncio.sleep(generator.random() * 0.1)
                if generator.random() < 0.5:
                    await link.cut()
                counts["cuts"] += 1

        replacing = asyncio.create_task(replace_links())
        await asyncio.gather(*(client(workers, number, name, counts) for number, name in enumerate(mine)))
        replacing.cancel()
        await asyncio.wait([replacing])
        await workers.connect(Link())
        assert min(counts.values()) >= CUTS, counts

    _run(test, worker_wait_secs=30)
