"""The Python client beside the official one and plain httpx: appends and followed messages per second of CPU time.

Wall-clock depends on the server and on the machine; what a client costs is the CPU time of its process. Each row is
the best of several alternating rounds.

    python -m bench.client
    python -m bench.client --rounds 5 --appends 3000
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Callable

import httpx
from durable_streams import AsyncDurableStream, DurableStream, stream

from bench.servers import headwater
from headwater import AsyncClient, Client

MESSAGE = {"n": 1, "text": "x" * 78}
BODY = json.dumps(MESSAGE, separators=(",", ":")).encode()
JSON = {"Content-Type": "application/json"}

Case = Callable[[str, int], None]
_names = itertools.count()


def append_httpx(url: str, count: int) -> None:
    with httpx.Client() as http:
        for _ in range(count):
            http.post(url, content=BODY, headers=JSON).raise_for_status()


def append_official(url: str, count: int) -> None:
    with DurableStream(url, content_type="application/json") as handle:
        for _ in range(count):
            handle.append(MESSAGE)


def append_ours(url: str, count: int) -> None:
    with Client(url) as client:
        target = client.stream(url)
        for _ in range(count):
            target.append(MESSAGE)


def append_async_httpx(url: str, count: int) -> None:
    async def run() -> None:
        async with httpx.AsyncClient() as http:
            for _ in range(count):
                (await http.post(url, content=BODY, headers=JSON)).raise_for_status()

    asyncio.run(run())


def append_async_official(url: str, count: int) -> None:
    async def run() -> None:
        async with AsyncDurableStream(url, content_type="application/json") as handle:
            for _ in range(count):
                await handle.append(MESSAGE)

    asyncio.run(run())


def append_async_ours(url: str, count: int) -> None:
    async def run() -> None:
        async with AsyncClient(url) as client:
            target = client.stream(url)
            for _ in range(count):
                await target.append(MESSAGE)

    asyncio.run(run())


def produce_ours(url: str, count: int) -> None:
    with Client(url) as client, client.stream(url).producer("bench") as producer:
        for _ in range(count):
            producer.append(MESSAGE)


def produce_async_ours(url: str, count: int) -> None:
    async def run() -> None:
        async with AsyncClient(url) as client, client.stream(url).producer("bench") as producer:
            for _ in range(count):
                await producer.append(MESSAGE)

    asyncio.run(run())


def filled(url: str, count: int) -> None:
    with httpx.Client() as http:
        for start in range(0, count, 1000):
            body = b"[" + b",".join([BODY] * min(1000, count - start)) + b"]"
            http.post(url, content=body, headers=JSON).raise_for_status()
        http.post(url, headers={"Stream-Closed": "true"}).raise_for_status()


def follow_httpx(url: str, count: int) -> None:
    seen, offset = 0, "-1"
    with httpx.Client() as http:
        while seen < count:
            page = http.get(url, params={"offset": offset}).raise_for_status()
            seen += len(page.json())
            offset = page.headers["stream-next-offset"]


def follow_official(url: str, count: int) -> None:
    with stream(url, offset="-1", live="sse") as response:
        assert sum(1 for _ in itertools.islice(response.iter_json(), count)) == count


def follow_ours(url: str, count: int) -> None:
    with Client(url) as client:
        assert sum(1 for _ in client.stream(url).follow()) == count


def sse_ours(url: str, count: int) -> None:
    """Events from the first message on, without the catch-up read."""
    from headwater.client.operations import StreamOperations
    from headwater.client.reading import Follower, Position

    with Client(url) as client:
        operations = StreamOperations(url, client.policy)
        at = Position("-1", "application/json")
        follower = Follower(operations, at, "sse", lambda batch: batch, exact=False)
        assert sum(len(batch.values) for batch in client.iterate(follower.batches())) == count


APPENDS: dict[str, Case] = {
    "httpx": append_httpx,
    "official": append_official,
    "ours": append_ours,
    "httpx, async": append_async_httpx,
    "official, async": append_async_official,
    "ours, async": append_async_ours,
}
PRODUCERS: dict[str, Case] = {"our producer": produce_ours, "our producer, async": produce_async_ours}
READS: dict[str, Case] = {
    "httpx, catch-up": follow_httpx,
    "official, events": follow_official,
    "ours, events": sse_ours,
    "ours, follow": follow_ours,
}


def cpu_us(case: Case, url: str, count: int) -> float:
    """CPU time of this process per message."""
    started = time.process_time()
    case(url, count)
    return (time.process_time() - started) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--appends", type=int, default=1500)
    parser.add_argument("--messages", type=int, default=100_000)
    arguments = parser.parse_args()
    with headwater() as server:
        root = f"{server.url}/v1/stream"

        def fresh() -> str:
            url = f"{root}/client-{next(_names)}"
            httpx.put(url, headers=JSON).raise_for_status()
            return url

        read_from = fresh()
        filled(read_from, arguments.messages)
        best: dict[str, float] = {}
        for _ in range(arguments.rounds):
            for name, case in APPENDS.items():
                best[name] = min(best.get(name, 1e9), cpu_us(case, fresh(), arguments.appends))
            for name, case in PRODUCERS.items():
                best[name] = min(best.get(name, 1e9), cpu_us(case, fresh(), arguments.messages))
            for name, case in READS.items():
                best[name] = min(best.get(name, 1e9), cpu_us(case, read_from, arguments.messages))
    for name, took_us in best.items():
        print(f"{name:22} {took_us:9.2f} µs of CPU per message")


if __name__ == "__main__":
    main()
