"""The stack's public keys over HTTP on this machine, so that Envoy fetches them again after a rotation.

Invariant: each answer is the file as it is now; a file that cannot be read or is no JSON is a 503, upon which Envoy
keeps the keys it has.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

_PATH: Final = "/jwks.json"


class JwksServer:
    """Serves one file on a free port of the loopback address, on a thread of its own."""

    def __init__(self, file: Path) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = (200, _keys(file)) if self.path == _PATH else (404, b"")
                if body is None:
                    status, body = 503, b""
                self.send_response(status)
                self.send_header("Content-Type", "application/jwk-set+json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
                """Every few seconds, for ever: nothing to tell."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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


def _keys(file: Path) -> bytes | None:
    try:
        content = file.read_bytes()
        json.loads(content)
    except (OSError, ValueError):
        return None
    return content
