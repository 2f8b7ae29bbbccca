"""Workers of one server in this process, and links between them that a test can hold back or cut at any byte."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headwater.cluster import messages
from headwater.cluster.shards import ShardMap
from headwater.cluster.worker import ServingWorker
from headwater.config import Settings
from headwater.http.server import Reloader


class Link:
    """The connection between workers 0 and 1. Direction 0 is from worker 0 to worker 1, direction 1 the other."""

    def __init__(self, *, limits: tuple[int | None, int | None] = (None, None), seed: int | None = None) -> None:
        self._ours: list[socket.socket] = []
        self.ends: list[socket.socket] = []
        for _ in range(2):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self._ours.append(ours)
            self.ends.append(theirs)
        self._limits = limits
        self._random = random.Random(seed) if seed is not None else None
        self.passed = [0, 0]
        self.flows = [asyncio.Event(), asyncio.Event()]
        for flow in self.flows:
            flow.set()
        self.is_cut = asyncio.Event()
        self._pumps = [asyncio.create_task(self._pump(direction)) for direction in range(2)]

    async def _pump(self, direction: int) -> None:
        loop, source, target = asyncio.get_running_loop(), self._ours[direction], self._ours[1 - direction]
        limit = self._limits[direction]
        try:
            while True:
                data = await loop.sock_recv(source, self._random.choice((1, 7, 300, 20_000)) if self._random else 65536)
                await self.flows[direction].wait()
                if limit is not None:
                    data = data[: limit - self.passed[direction]]
                await loop.sock_sendall(target, data)
                self.passed[direction] += len(data)
                if not data or self.passed[direction] == limit:
                    break
        except OSError:
            pass  # The other direction has cut the link.
        self._close()

    def _close(self) -> None:
        self.is_cut.set()
        for end in self._ours:
            end.close()

    async def cut(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.wait(self._pumps)
        self._close()


class LinkedWorkers:
    """Two workers, which the test supervises."""

    def __init__(self, **server: Any) -> None:
        self._settings = Settings.model_validate({"server": server, "storage": {"mode": "memory"}})
        self.workers: list[ServingWorker] = []
        self._controls: list[socket.socket] = []
        self._theirs: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[RawClient] = []
        self._ports: list[int] = []
        self.link: Link | None = None

    async def start(self) -> None:
        for number in range(2):
            listening = socket.create_server(("127.0.0.1", 0))
            listening.setblocking(False)
            self._ports.append(listening.getsockname()[1])
            ours, theirs = messages.pair()
            worker = ServingWorker(
                self._settings, Reloader(lambda: self._settings), number, ShardMap(16, 2), [listening], theirs
            )
            self.workers.append(worker)
            self._controls.append(ours)
            self._theirs.append(theirs)
            self._tasks.append(asyncio.create_task(worker.run()))
            await self._wait_for(number, messages.Hello)
        await self.connect(Link())
        for number in range(2):
            await self._wait_for(number, messages.Ready)
            self.send(number, messages.Serve())

    async def stop(self) -> None:
        for client in self._clients:
            client.close()
        for number in range(2):
            self.send(number, messages.Stop())
        await asyncio.wait_for(asyncio.gather(*self._tasks), 60)
        if self.link is not None:
            await self.link.cut()
        for end in (*self._controls, *self._theirs):
            end.close()

    async def client(self, number: int = 0) -> RawClient:
        """A connection to a worker."""
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self._ports[number], limit=1 << 20))
        self._clients.append(client)
        return client

    async def metrics(self) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._ports[0])
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        try:
            return (await reader.read()).decode()
        finally:
            writer.close()

    def send(self, number: int, message: messages.Message, descriptors: tuple[int, ...] = ()) -> None:
        assert messages.send(self._controls[number], message, descriptors)

    async def connect(self, link: Link, *, can_move: bool = False) -> None:
        """Connect the workers as after a restart; an earlier link is replaced, and not closed.

        Connections of clients do not move unless they can, so that every request is relayed.
        """
        self.link = link
        moves = messages.pair()
        for number in range(2):
            given, closed = (moves[number], None) if can_move else messages.pair()
            if closed is not None:
                closed.close()
            self.send(number, messages.Connect(1 - number), (link.ends[number].fileno(), given.fileno()))
            given.close()
            link.ends[number].close()
        for end in moves:
            end.close()
        await asyncio.sleep(0)

    async def _wait_for(self, number: int, wanted: type[messages.Message]) -> None:
        while True:
            try:
                received = messages.receive(self._controls[number])
            except BlockingIOError:
                await asyncio.sleep(0.002)
                continue
            assert received is not None, "the worker ended"
            assert not isinstance(received[0], messages.Failed), received[0]
            if isinstance(received[0], wanted):
                return


@asynccontextmanager
async def linked_workers(**server: Any) -> AsyncIterator[LinkedWorkers]:
    workers = LinkedWorkers(**server)
    await workers.start()
    try:
        yield workers
    finally:
        await workers.stop()


class RawClient:
    """One connection of a client. Requests raise `ConnectionError` if it is closed before the response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, method: str, name: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """Send a request about a stream; return the status and the body of its response."""
        self.send(method, name, body, **headers)
        return await self.receive()

    def send(self, method: str, name: str, body: bytes = b"", **headers: str) -> None:
        fields = {"Host": "localhost", "Content-Type": "text/plain", "Content-Length": str(len(body))} | headers
        query = "?offset=-1" if method == "GET" and "?" not in name else ""
        lines = [f"{method} /v1/stream/{name}{query} HTTP/1.1"]
        lines += [f"{key.replace('_', '-')}: {value}" for key, value in fields.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def receive(self) -> tuple[int, bytes]:
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await self._reader.readexactly(int(fields.get("content-length", "0")))
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("closed before the response") from error
        return int(head.split(" ", 2)[1]), body

    def close(self) -> None:
        self._writer.transport.abort()
