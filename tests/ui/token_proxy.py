"""A proxy that requires a bearer token, as Envoy does in front of the server.

It passes bytes on as they come, so that live reads stream through; CORS preflights pass without a token. Every
connection carries one request, so that the token of each is looked at.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer
from urllib.parse import urlsplit

TOKEN = "let-me-in-please"

_REFUSED = (
    b"HTTP/1.1 401 Unauthorized\r\nContent-Type: text/plain\r\nContent-Length: 18\r\nConnection: close\r\n"
    b"Access-Control-Allow-Origin: *\r\n\r\nA token is wanted."
)


class _Guarded(StreamRequestHandler):
    target: tuple[str, int]

    def handle(self) -> None:
        lines: list[bytes] = []
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            if not line.lower().startswith(b"connection:"):
                lines.append(line)
        if not lines:
            return
        wanted = f"authorization: bearer {TOKEN}\r\n".encode()
        if not lines[0].startswith(b"OPTIONS ") and not any(line.lower() == wanted for line in lines):
            self.wfile.write(_REFUSED)
            return
        length = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        with suppress(OSError), socket.create_connection(self.target, timeout=60) as behind:
            self._watch(behind)
            behind.sendall(b"".join(lines) + b"Connection: close\r\n\r\n" + self.rfile.read(length))
            while chunk := behind.recv(65536):
                self.wfile.write(chunk)

    def _watch(self, behind: socket.socket) -> None:
        """A client that leaves takes its connection to the server with it."""

        def wait() -> None:
            with suppress(OSError):
                while self.connection.recv(1024):
                    pass
            with suppress(OSError):
                behind.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=wait, daemon=True).start()


class _Proxy(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False


@contextmanager
def token_proxy(url: str) -> Iterator[str]:
    """The address of a proxy in front of `url`."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    handler = type("Guarded", (_Guarded,), {"target": (parts.hostname, parts.port)})
    with _Proxy(("127.0.0.1", 0), handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), name="token-proxy")
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()
            thread.join(10)
