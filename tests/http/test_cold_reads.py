"""Every kind of read of data that is no longer on the disk, while other requests continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from headwater import Server
from tests.waiting import async_wait_until

MESSAGE = 150_000
EXPECTED = [bytes([ord("a") + number]) * MESSAGE for number in range(20)]
TEXT = {"Content-Type": "text/plain"}
SETTINGS = {
    "storage.cold": "memory:///",
    "storage.cold_cache_bytes": 2**20,
    "storage.hot_tail_bytes": 2**20,
    "storage.segment_bytes": 2**20,
    "server.long_poll_timeout_secs": 2,
}


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    # Compressed answers would be shorter than what the cache holds.
    headers = {"Accept-Encoding": "identity"}
    async with (
        Server(directory, settings=SETTINGS) as server,
        httpx.AsyncClient(timeout=60.0, headers=headers) as client,
    ):
        yield server, client


async def fill(client: httpx.AsyncClient, url: str) -> list[str]:
    """Append all messages, with retries while storage is busy; returns the offset after each."""
    offsets = []
    for body in EXPECTED:
        answer = await client.post(url, content=body, headers=TEXT)
        while answer.status_code == 503:
            await asyncio.sleep(0.01)
            answer = await client.post(url, content=body, headers=TEXT)
        offsets.append(answer.headers["Stream-Next-Offset"])
    return offsets


def bytes_in(directory: Path) -> int:
    total = 0
    for path in directory.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_evicted_data_is_readable_in_every_way(tmp_path: Path) -> None:
    async def program() -> None:
        async with running(tmp_path / "data") as (server, client):
            url = server.stream_url("cold")
            await client.put(url, headers=TEXT)
            offsets = await fill(client, url)
            await async_wait_until(lambda: bytes_in(tmp_path / "data" / "packs") <= 2**20, what="packs leave the disk")
            # Each of these reads more than the cache holds, so the next one finds little of what it needs.
            whole = await client.get(url, params={"offset": "-1"})
            assert whole.content == b"".join(EXPECTED)
            framed = await client.get(url, params={"offset": "-1", "frames": "1"})
            assert framed.content.endswith(b"".join(EXPECTED))
            found = await client.get(url, params={"offset": "-1", "splits": "4"})
            assert found.json()["ranges"][-1]["end"] == offsets[-1]
            polled = await client.get(url, params={"offset": offsets[2], "live": "long-poll"})
            assert polled.content == b"".join(EXPECTED[3:])
            seen = b""
            async with client.stream("GET", url, params={"offset": offsets[0], "live": "sse"}) as events:
                async for piece in events.aiter_bytes():
                    seen += piece
                    if b"data:" + EXPECTED[-1] in seen:
                        break
            assert all(b"data:" + body in seen for body in EXPECTED[1:])
            begun = await client.post(f"{server.url}/v1/stream/__ds/follow", json={"streams": {"cold": "-1"}})
            assert begun.status_code == 201, begun.text
            seen = b""
            async with client.stream("GET", begun.headers["Location"]) as events:
                async for piece in events.aiter_bytes():
                    seen += piece
                    if EXPECTED[-1] in seen:
                        break
            assert all(body in seen for body in EXPECTED)
            inside = f"0000000000000001_{MESSAGE + 1:016x}"
            assert (await client.get(url, params={"offset": inside})).status_code == 400

    asyncio.run(program())


@pytest.mark.parametrize("size", [1024, 2 * 2**20])
def test_snapshots_and_bootstrap_are_read_from_the_object_store(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256)

    async def program() -> None:
        async with running(tmp_path / "data") as (server, client):
            await client.put(f"{server.url}/ds/bucket")
            url = f"{server.url}/ds/bucket/s"
            created = await client.put(url, headers=TEXT)
            start = created.headers["Stream-Next-Offset"]
            published = await client.put(f"{url}/snapshot/{start}", content=content, headers=TEXT)
            assert published.status_code == 204, published.text
            await fill(client, url)
            data = tmp_path / "data"
            await async_wait_until(
                lambda: bytes_in(data / "packs") + bytes_in(data / "blobs") <= 2**20, what="packs and blobs leave"
            )
            answer = await client.get(f"{url}/bootstrap")
            assert answer.status_code == 200, answer.text
            assert content in answer.content
            assert all(body in answer.content for body in EXPECTED)
            snapshot = await client.get(f"{url}/snapshot", follow_redirects=True)
            assert snapshot.content == content

    asyncio.run(program())
