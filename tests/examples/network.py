"""The network of a browser, which a test can cut: a SOCKS5 proxy that all its connections pass.

Invariant: while the network is cut, no byte passes in either direction and every connection is reset, also new ones.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SUCCEEDED = b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00"
_IPV4, _NAME, _IPV6 = 1, 3, 4


class Network:
    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._stopped = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.url = ""
        self.cut_connections = 0

    def cut(self) -> None:
        """Reset the connections that are open, and all that are tried."""
        self._call(self._cut)

    def restore(self) -> None:
        self._is_cut = False

    def _cut(self) -> None:
        self._is_cut = True
        self.cut_connections += len(self._open)
        for writer in self._open:
            writer.transport.abort()

    def _call(self, step: Callable[[], None]) -> None:
        """Run a step in the thread of the proxy; returns once it has run."""
        done = threading.Event()

        def run() -> None:
            step()
            done.set()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(run)
        assert done.wait(30)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = None
        self._open.add(writer)
        try:
            upstream_reader, upstream = await self._connect(reader, writer)
            self._open.add(upstream)
            await asyncio.gather(_copy(reader, upstream), _copy(upstream_reader, writer))
        except (OSError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for end in (writer, upstream):
                if end is not None:
                    self._open.discard(end)
                    end.transport.abort()

    async def _connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._is_cut:
            raise ConnectionError("the network is cut")
        _, methods = await reader.readexactly(2)
        await reader.readexactly(methods)
        writer.write(b"\x05\x00")
        _, _, _, kind = await reader.readexactly(4)
        if kind == _NAME:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
        else:
            family, size = (socket.AF_INET, 4) if kind == _IPV4 else (socket.AF_INET6, 16)
            host = socket.inet_ntop(family, await reader.readexactly(size))
        port = int.from_bytes(await reader.readexactly(2), "big")
        found = await asyncio.open_connection(host, port)
        writer.write(_SUCCEEDED)
        return found

    @contextmanager
    def running(self) -> Iterator[Network]:
        thread = threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True)
        thread.start()
        assert self._started.wait(30)
        try:
            yield self
        finally:
            self._call(self._stopped.set)
            thread.join(30)
            assert not thread.is_alive()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"socks5://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stopped.wait()
        server.close()
        self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()
