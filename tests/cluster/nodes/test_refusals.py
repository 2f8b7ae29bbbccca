"""A node without shards answers every client with 503, however many there are."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Iterator

import pytest

from headwater.cluster.nodes.refusals import ACCEPTED_MAX, LINGER_S, REFUSED_MAX, Refusals


class Node:
    """The part of a supervisor that has to do with clients."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=REFUSED_MAX)
        self.listening.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.refusals = Refusals([self.listening], self.selector)
        self.refusals.turn(0.0, should_refuse=True)

    def turn(self) -> bool:
        ready = self.selector.select(0)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def client(self) -> socket.socket:
        client = socket.create_connection(self.listening.getsockname(), timeout=10)
        client.send(b"GET /v1/stream/s HTTP/1.1\r\n\r\n")
        return client


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.refusals.turn(float("inf"), should_refuse=False)
    made.listening.close()
    made.selector.close()


def test_client_gets_503_and_the_connection_ends(node: Node) -> None:
    with node.client() as client:
        node.turn()
        with client.makefile("rb") as response:
            head, _, body = response.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1" in head
    assert b"This node has no shards" in body


def test_many_clients_neither_stop_the_other_work_nor_use_all_descriptors(node: Node) -> None:
    clients = [node.client() for _ in range(REFUSED_MAX)]
    turns = 0
    while node.turn():
        turns += 1
    assert turns >= REFUSED_MAX // ACCEPTED_MAX, "the supervisor has other work in between"
    clients += [node.client() for _ in range(10)]
    node.turn()
    assert len(node.refusals._refused) == REFUSED_MAX
    node.refusals.turn(float("inf"), should_refuse=True)
    assert not node.refusals._refused, f"they are closed after {LINGER_S} s"
    for client in clients:
        client.close()


def test_supervisor_without_a_free_descriptor_continues(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept(_listening: socket.socket) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")

    with node.client() as client:
        with monkeypatch.context() as exhausted:
            exhausted.setattr(socket.socket, "accept", accept)
            node.turn()
        assert "Too many open files" in caplog.text
        node.turn()
        assert client.recv(12) == b"HTTP/1.1 503"
