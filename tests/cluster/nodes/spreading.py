"""One address for several nodes: each new connection goes to the next of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


@contextmanager
def spread_over(urls: Sequence[str]) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="spreading", daemon=True)
    thread.start()
    nodes = itertools.cycle([(str(urlsplit(url).hostname), int(urlsplit(url).port or 80)) for url in urls])
    connections: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        with suppress(OSError, RuntimeError):
            writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            there, back = await asyncio.open_connection(*next(nodes))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, back), pump(there, writer))
        connections.discard(task)

    async def stop() -> None:
        server.close()
        for task in tuple(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(forward, "127.0.0.1", 0), loop).result(30)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
