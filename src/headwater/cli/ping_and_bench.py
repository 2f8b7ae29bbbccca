"""`headwater ping` and `headwater bench`: check that a server responds, and run a short load test.

Invariant: the load test writes only to a stream that it creates, and deletes it at the end.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.remote import DEFAULT_URL, CaFile, Token, Url, client_errors, connected
from headwater.printable import printable

if TYPE_CHECKING:
    from headwater.client import AsyncClient, AsyncStream

Server = Annotated[str, typer.Argument(metavar="URL", help="The server, instead of --url.", show_default=False)]


def ping(
    server: Server = "",
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=10_000, help="Number of requests.")] = 5,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Check that a Durable Streams server responds, and print the response times."""
    from headwater.client import StreamNotFoundError

    url = server or url
    times_s = []
    with connected(url, token, ca_file) as client:
        # There is no stream with this name, so a Durable Streams server responds with 404.
        stream = client.stream(f"ping-{secrets.token_hex(8)}")
        for _ in range(count):
            began = time.perf_counter()
            with suppress(StreamNotFoundError):
                stream.head()
            times_s.append(time.perf_counter() - began)
    typer.echo(f"{printable(url)} responds: {_percentiles(times_s)}")


def bench(
    server: Server = "",
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=3600, help="Duration of the appends.")] = 5.0,
    connections: Annotated[int, typer.Option("--connections", "-c", min=1, max=1000, help="Concurrent writers.")] = 8,
    size: Annotated[int, typer.Option("--size", min=1, max=16_000_000, help="Bytes of one message.")] = 100,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Append for some seconds to a temporary stream, read it back, and print rates and percentiles.

    One Python process produces the load, so this command can be the bottleneck: compare runs, not products.
    """
    from headwater.client import NO_RETRY, AsyncClient, Policy

    url = server or url

    async def measure() -> None:
        policy = Policy(retry=NO_RETRY)
        async with AsyncClient(url, token=token, ca_file=ca_file, policy=policy) as client:
            stream = client.stream(f"bench-{secrets.token_hex(8)}")
            await stream.create("application/octet-stream")
            try:
                await _measure_appends(client, stream, seconds, connections, b"x" * size)
                await _measure_read(stream)
            finally:
                await stream.delete(missing_ok=True)

    # Check the address before the measurement, with readable errors.
    ping(count=1, url=url, token=token, ca_file=ca_file)
    with client_errors(url):
        asyncio.run(measure())


async def _measure_appends(
    client: AsyncClient, stream: AsyncStream, seconds: float, connections: int, body: bytes
) -> None:
    times_s: list[float] = []
    began = time.perf_counter()
    deadline = began + seconds

    async def write() -> None:
        own = client.stream(stream.url)
        while (sent := time.perf_counter()) < deadline:
            await own.append_body(body)
            times_s.append(time.perf_counter() - sent)

    await asyncio.gather(*(write() for _ in range(connections)))
    rate = len(times_s) / (time.perf_counter() - began)
    typer.echo(
        f"append: {len(times_s):,} messages of {len(body):,} bytes over {connections} connections,"
        f" {rate:,.0f} per second; {_percentiles(times_s)}"
    )


async def _measure_read(stream: AsyncStream) -> None:
    from headwater.client import BEGINNING

    size = 0
    began = time.perf_counter()
    async with stream.read(BEGINNING) as reader:
        async for batch in reader.batches():
            size += sum(len(body) for body in batch.bodies)
    duration = max(time.perf_counter() - began, 1e-9)
    typer.echo(f"read: {size:,} bytes in {duration:.2f} s, {size / duration / 1e6:,.1f} MB/s")


def _percentiles(times_s: list[float]) -> str:
    ordered = sorted(times_s)

    def at(share: float) -> str:
        return f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000:.1f} ms"

    return f"median {at(0.5)}, 95 % {at(0.95)}, 99 % {at(0.99)}, maximum {ordered[-1] * 1000:.1f} ms"
