"""Publish the stack's public keys over HTTP on the loopback address, so that Envoy fetches them after a rotation.

Invariant: each response holds the current content of the file. If the file cannot be read or is not JSON, the response
is 503 and Envoy keeps the keys that it has.
"""

from __future__ import annotations

import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

_PATH: Final = "/jwks.json"


class JwksServer:
    """Serves one file on a free loopback port, on its own thread."""

    def __init__(self, file: Path) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_JwksRequestHandler, file))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="jwks", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}{_PATH}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _JwksRequestHandler(BaseHTTPRequestHandler):
    def __init__(self, file: Path, *arguments: Any) -> None:
        self._file = file
        super().__init__(*arguments)

    def do_GET(self) -> None:
        status, body = (200, _read_keys(self._file)) if self.path == _PATH else (404, b"")
        if body is None:
            status, body = 503, b""
        self.send_response(status)
        self.send_header("Content-Type", "application/jwk-set+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Log nothing: Envoy sends a request every few seconds."""


def _read_keys(file: Path) -> bytes | None:
    try:
        content = file.read_bytes()
        json.loads(content)
    except (OSError, ValueError):
        return None
    return content
