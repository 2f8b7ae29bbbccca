"""A proxy that holds one append and kills its sender, to simulate the late append of a dead executor.

Invariant: the held append reaches the server only when the test releases it, byte for byte as it was sent.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import psutil

_PASSED_ON = ("content-type", "producer-id", "producer-epoch", "producer-seq")


@dataclass(frozen=True, slots=True)
class Append:
    path: str
    headers: dict[str, str]
    body: bytes


class HoldingProxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: str, epoch: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        address = urlsplit(root)
        assert address.hostname is not None
        self.server_at = (address.hostname, address.port or 80)
        self.root = f"http://127.0.0.1:{self.server_port}{address.path}"
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


class _Handler(BaseHTTPRequestHandler):
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

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named so by the base class
        """Log nothing."""


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
    proxy = HoldingProxy(root, epoch)
    thread = threading.Thread(target=proxy.serve_forever, name="holding-proxy", daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join(timeout=60)
        proxy.server_close()
