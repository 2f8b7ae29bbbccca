"""The Python client compared with the official one and plain httpx: appends and followed messages per second.

The clients take turns within each round, so that other load on the machine affects all of them. A rate depends on the
server and on the machine, the CPU time of the process only on the client. Both are printed, each with the median over
the rounds of its ratio to our client in the same round.

    python -m bench.client
    python -m bench.client --rounds 9 --appends 3000
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from statistics import median

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


def events_httpx(url: str, count: int) -> None:
    """Server-sent events without a library: no reconnects, only JSON."""
    seen = 0
    with httpx.Client() as http, http.stream("GET", url, params={"offset": "-1", "live": "sse"}) as response:
        kind = ""
        for line in response.iter_lines():
            if line.startswith("event:"):
                kind = line[6:].strip()
            elif line.startswith("data:") and kind == "data":
                seen += len(json.loads(line[5:]))
                if seen >= count:
                    break
    assert seen == count


def follow_official(url: str, count: int) -> None:
    with stream(url, offset="-1", live="sse") as response:
        assert sum(1 for _ in itertools.islice(response.iter_json(), count)) == count


def follow_ours(url: str, count: int) -> None:
    with Client(url) as client:
        assert sum(1 for _ in client.stream(url).follow()) == count


def sse_ours(url: str, count: int) -> None:
    """Events from the first message, without a catch-up read."""
    from headwater.client.operations import StreamOperations
    from headwater.client.reading import Follower, Position

    with Client(url) as client:
        operations = StreamOperations(url, client.policy)
        at = Position("-1", "application/json")
        follower = Follower(operations, at, "sse", lambda batch: batch, exact=False)
        assert sum(len(batch.values) for batch in client.iterate(follower.batches())) == count


class Group:
    """Cases that do the same work; the first is ours."""

    def __init__(self, title: str, count: int, cases: dict[str, Case], *, fresh: bool) -> None:
        self.title = title
        self.count = count
        self.cases = cases
        self.fresh = fresh
        """Whether each run needs a new stream."""
        self.rates: dict[str, list[float]] = {name: [] for name in cases}
        self.cpu_us: dict[str, list[float]] = {name: [] for name in cases}

    def run(self, url: Callable[[], str]) -> None:
        """One round: each case once."""
        for name, case in self.cases.items():
            target = url()
            started, cpu = time.perf_counter(), time.process_time()
            case(target, self.count)
            self.rates[name].append(self.count / (time.perf_counter() - started))
            self.cpu_us[name].append((time.process_time() - cpu) / self.count * 1e6)

    def lines(self) -> Iterator[str]:
        ours = next(iter(self.cases))
        for name in self.cases:
            rate = median(a / b for a, b in zip(self.rates[ours], self.rates[name], strict=True))
            cpu = median(a / b for a, b in zip(self.cpu_us[name], self.cpu_us[ours], strict=True))
            yield (
                f"| {self.title} | {name} | {median(self.rates[name]):,.0f} | {rate:.1f} |"
                f" {median(self.cpu_us[name]):.2f} | {cpu:.1f} |"
            )


def groups(appends: int, messages: int) -> list[Group]:
    return [
        Group(
            "append, one per request",
            appends,
            {"Headwater": append_ours, "httpx": append_httpx, "official": append_official},
            fresh=True,
        ),
        Group(
            "the same with asyncio",
            appends,
            {"Headwater": append_async_ours, "httpx": append_async_httpx, "official": append_async_official},
            fresh=True,
        ),
        Group(
            "append by a producer",
            messages,
            {"Headwater": produce_ours, "Headwater, asyncio": produce_async_ours},
            fresh=True,
        ),
        Group(
            "follow by events",
            messages,
            {"Headwater": sse_ours, "httpx": events_httpx, "official": follow_official},
            fresh=False,
        ),
        Group("catch up, then follow", messages, {"Headwater": follow_ours, "httpx": follow_httpx}, fresh=False),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--appends", type=int, default=1500)
    parser.add_argument("--messages", type=int, default=100_000)
    arguments = parser.parse_args()
    compared = groups(arguments.appends, arguments.messages)
    with headwater() as server:
        root = f"{server.url}/v1/stream"

        def fresh() -> str:
            url = f"{root}/client-{next(_names)}"
            httpx.put(url, headers=JSON).raise_for_status()
            return url

        read_from = fresh()
        filled(read_from, arguments.messages)
        for _ in range(arguments.rounds):
            for group in compared:
                group.run(fresh if group.fresh else lambda: read_from)
    print("| | client | messages/s | Headwater is faster by | CPU µs per message | CPU ÷ Headwater |")
    print("|---|---|---|---|---|---|")
    for group in compared:
        print("\n".join(group.lines()))


if __name__ == "__main__":
    main()
