"""A proxy that holds one append and kills its sender, to simulate the late append of a dead executor.

Invariant: the held append reaches the server only when the test releases it, byte for byte as it was sent.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from tests.http_handlers import HandlerServer, QuietHandler

_PASSED_ON = ("content-type", "producer-id", "producer-epoch", "producer-seq")


@dataclass(frozen=True, slots=True)
class Append:
    path: str
    headers: dict[str, str]
    body: bytes


class HoldingProxy(HandlerServer):
    def __init__(self, root: str, epoch: int) -> None:
        super().__init__(_Handler)
        address = urlsplit(root)
        assert address.hostname is not None
        self.server_at = (address.hostname, address.port or 80)
        self.root = f"{self.url}{address.path}"
        self.epoch = str(epoch)
        self.held: Append | None = None
        self.killed: int | None = None
        self._lock = threading.Lock()

    def hold(self, append: Append, port: int) -> bool:
        """Hold the first append of the batch, and kill -9 the process that sent it."""
        with self._lock:
            if self.held is not None or append.headers.get("producer-epoch") != self.epoch:
                return False
            self.held = append
            self.killed = _process_at(port)
            psutil.Process(self.killed).kill()
            return True

    def let_go(self) -> int:
        """Send the held append; return the status of the response."""
        assert self.held is not None, "no append of that batch was seen"
        return self.pass_on("POST", self.held)[0]

    def pass_on(self, method: str, append: Append) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.server_at, timeout=60)
        try:
            connection.request(method, append.path, append.body, append.headers)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    server: HoldingProxy

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items() if name.lower() in _PASSED_ON}
        append = Append(self.path, headers, body)
        if method == "POST" and self.server.hold(append, self.client_address[1]):
            self.close_connection = True
            return
        status, answered, content = self.server.pass_on(method, append)
        self.send_response(status)
        for name, value in answered.items():
            if name not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _process_at(port: int) -> int:
    """The process that owns this port."""
    for process in psutil.Process().children(recursive=True):
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        if port in {one.laddr.port for one in connections}:
            return process.pid
    raise AssertionError(f"no process of ours has port {port}")


@contextmanager
def holding(root: str, *, epoch: int) -> Iterator[HoldingProxy]:
    """A proxy for the stream root that holds the first append of this batch."""
    with HoldingProxy(root, epoch).running() as proxy:
        yield proxy
