"""TCP proxies that fail as networks and proxies do: they break connections, or reject event streams."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from typing import TypeVar
from urllib.parse import urlsplit


class Proxy:
    """Forwards connections to a server, each on its own threads. Subclasses interfere."""

    def __init__(self, target: str) -> None:
        address = urlsplit(target)
        assert address.hostname is not None
        self._target = (address.hostname, address.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[str] = []
        """The received request lines, in order."""
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def connect(self) -> socket.socket:
        """A connection to the server."""
        return socket.create_connection(self._target)

    def on_request(self, data: bytes, client: socket.socket) -> bool:
        """Whether to forward data from a client."""
        return True

    def on_response(self, data: bytes) -> tuple[bytes, bool]:
        """The part of a response to forward, and whether to keep the connection."""
        return data, True

    def break_connections(self) -> None:
        """Cut all open connections, even in the middle of a response."""
        with self._lock:
            for connection in self._open:
                _cut(connection)
            self._open.clear()

    def close(self) -> None:
        # Closing alone would not end `accept`, which could then accept for the next proxy, on the same descriptor.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(60)
        self._listener.close()
        self.break_connections()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = self.connect()
            except OSError:
                _cut(client)
                continue
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._pump_requests, args=(client, server), daemon=True).start()
            threading.Thread(target=self._pump_responses, args=(server, client), daemon=True).start()

    def _pump_requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                line = data.split(b"\r\n", 1)[0].decode("latin-1")
                if line.endswith("HTTP/1.1"):
                    self.requests.append(line)
                if not self.on_request(data, client):
                    continue
                server.sendall(data)
        _cut(server)

    def _pump_responses(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                forwarded, keep = self.on_response(data)
                client.sendall(forwarded)
                if not keep:
                    break
        _cut(client)
        _cut(server)


class CutNetwork(Proxy):
    """A network that is down from `cut` to `restore`: open connections break, and new ones are refused."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._is_cut = False
        self.cuts = 0
        """Connections that were cut."""

    def cut(self) -> None:
        self._is_cut = True
        self.cuts += len(self._open)
        self.break_connections()

    def restore(self) -> None:
        self._is_cut = False

    def connect(self) -> socket.socket:
        if self._is_cut:
            raise ConnectionRefusedError
        return super().connect()


class CutAnswers(Proxy):
    """Cuts a connection once so many more bytes of answers have passed, and leaves later ones alone."""

    left: int | None = None

    def on_response(self, data: bytes) -> tuple[bytes, bool]:
        if self.left is None:
            return data, True
        passed, self.left = data[: self.left], self.left - len(data)
        if self.left >= 0:
            return data, True
        self.left = None
        return passed, False


class WithoutEvents(Proxy):
    """Responds with 406 to requests for server-sent events."""

    def on_request(self, data: bytes, client: socket.socket) -> bool:
        if b"live=sse" not in data.split(b"\r\n", 1)[0]:
            return True
        client.sendall(b"HTTP/1.1 406 Not Acceptable\r\nContent-Length: 0\r\n\r\n")
        return False


class Breaking(Proxy):
    """Cuts one in three responses at a random byte."""

    def __init__(self, target: str, seed: int = 1) -> None:
        super().__init__(target)
        self._random = random.Random(seed)
        self.cuts = 0

    def on_response(self, data: bytes) -> tuple[bytes, bool]:
        if self._random.random() > 1 / 3:
            return data, True
        self.cuts += 1
        return data[: self._random.randrange(len(data))], False


ProxyT = TypeVar("ProxyT", bound=Proxy)


@contextlib.contextmanager
def running(proxy: ProxyT) -> Iterator[ProxyT]:
    try:
        yield proxy
    finally:
        proxy.close()


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
