"""A connection that is handed over belongs to one worker at any time, also if the other one dies before it accepts."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest

from headwater.cluster import messages
from headwater.cluster.handover import HandedConnection, HandOver
from tests.cluster.workers import name_in, process_of
from tests.serving import serve
from tests.waiting import connections_idle, wait_until

TEXT = {"Content-Type": "text/plain"}
REQUEST = b"POST /v1/stream/s HTTP/1.1\r\n\r\n"


class Ends:
    """Two workers, the sockets between them, and the requests that each of them processed."""

    def __init__(self) -> None:
        self.processed: tuple[list[bytes], list[bytes]] = ([], [])
        loop = asyncio.get_running_loop()
        self.workers = [HandOver(loop, self._maker(number)) for number in range(2)]
        self._clients: list[socket.socket] = []

    def _maker(self, number: int) -> Callable[[bytes], HandedConnection]:
        def make(request: bytes) -> HandedConnection:
            self.processed[number].append(request)
            return cast(HandedConnection, asyncio.Protocol())

        return make

    def connect(self) -> None:
        for worker, opened, other in zip(self.workers, messages.pair(), (1, 0), strict=True):
            worker.connect(other, opened)

    def move(self, request: bytes = REQUEST) -> bool:
        """Hand a connection from worker 0 to worker 1."""
        client, accepted = socket.socketpair()
        self._clients.append(client)
        with accepted:
            return self.workers[0].send(1, accepted.fileno(), request)

    def close(self) -> None:
        for worker, other in zip(self.workers, (1, 0), strict=True):
            worker.disconnect(other)
        for client in self._clients:
            client.close()


def run(scene: Callable[[Ends], Awaitable[None]]) -> None:
    async def main() -> None:
        before = psutil.Process().num_fds()
        ends = Ends()
        ends.connect()
        await scene(ends)
        ends.close()
        await connections_idle()
        assert psutil.Process().num_fds() - before <= sum(map(len, ends.processed)), "descriptors are left"

    asyncio.run(main())


def test_accepted_connection_is_not_kept_when_the_other_worker_dies() -> None:
    async def scene(ends: Ends) -> None:
        assert ends.move()
        ends.workers[1]._receive(ends.workers[1]._ways[0])
        ends.workers[1].disconnect(0)
        ends.workers[0].disconnect(1)
        await connections_idle()
        assert ends.processed == ([], [REQUEST])

    run(scene)


@pytest.mark.parametrize("first", [0, 1], ids=["sender", "receiver"])
def test_connection_that_was_not_accepted_is_kept(first: int) -> None:
    async def scene(ends: Ends) -> None:
        requests = [b"%d" % number + REQUEST for number in range(3)]
        assert all(ends.move(request) for request in requests)
        ends.workers[first].disconnect(1 - first)
        await connections_idle()
        ends.workers[1 - first].disconnect(first)
        await connections_idle()
        assert ends.processed == (requests, [])

    run(scene)


def test_connection_for_which_the_other_worker_has_no_descriptor_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = socket.recv_fds

    def without_descriptor(opened: socket.socket, size: int, count: int) -> object:
        message, descriptors, flags, address = receive(opened, size, count)
        for descriptor in descriptors:
            os.close(descriptor)
        return message, [], flags, address

    async def scene(ends: Ends) -> None:
        monkeypatch.setattr(socket, "recv_fds", without_descriptor)
        assert ends.move()
        await connections_idle()
        monkeypatch.undo()
        await connections_idle()
        assert ends.processed == ([REQUEST], [])

    run(scene)


def test_connection_is_processed_when_its_acceptance_is_sent() -> None:
    async def scene(ends: Ends) -> None:
        full = ends.workers[1]._ways[0].opened
        while True:
            try:
                full.send(b"\1")
            except BlockingIOError:
                break
        assert ends.move()
        ends.workers[1]._receive(ends.workers[1]._ways[0])
        await asyncio.sleep(0)
        assert ends.processed == ([], [])
        opened = ends.workers[0]._ways[1].opened
        while True:
            try:
                opened.recv(1)
            except BlockingIOError:
                break
        await connections_idle()
        assert ends.processed == ([], [REQUEST])

    run(scene)


def test_requests_of_moving_connections_wait_for_the_restart_of_a_stopped_worker(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "DS_SERVER__WORKERS": "2",
        "DS_SERVER__WORKER_TIMEOUT_SECS": "1",
        "DS_STORAGE__MODE": "file-durable",
    }
    with serve(directory=tmp_path, **settings) as server:
        name = name_in(1, 2)
        with httpx.Client(base_url=server.url) as client:
            client.put(f"/v1/stream/{name}", headers=TEXT, content=b"kept").raise_for_status()
        process_of(server, 1).suspend()
        for number in range(3):
            with httpx.Client(base_url=server.url, timeout=60) as client:
                if number == 0:
                    appended = client.post(f"/v1/stream/{name}", headers=TEXT, content=b" once")
                    assert appended.status_code == 204, appended.text
                    process_of(server, 1).suspend()
                else:
                    assert client.get(f"/v1/stream/{name}?offset=-1").text == "kept once"


def test_requests_of_moving_connections_are_503_when_the_worker_is_not_restarted(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "DS_SERVER__WORKERS": "2",
        "DS_SERVER__WORKER_WAIT_SECS": "0.5",
        "DS_STORAGE__MODE": "file-durable",
    }
    with serve(directory=tmp_path, **settings) as server:
        name = name_in(1, 2)
        supervisor, stopped = psutil.Process(server.pid), process_of(server, 1)
        stopped.suspend()
        supervisor.suspend()
        try:
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall(f"PUT /v1/stream/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                worker = process_of(server, 0)
                port = client.getsockname()[1]
                wait_until(
                    lambda: any(opened.raddr[1:] == (port,) for opened in worker.net_connections()),
                    what="worker 0 to have the connection",
                )
                stopped.kill()
                refused = client.recv(65536)
        finally:
            supervisor.resume()
        assert refused.startswith(b"HTTP/1.1 503 "), refused
        assert b"\r\nRetry-After: " in refused
