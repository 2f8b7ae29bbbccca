"""The pipeline's HTTP endpoint: /metrics for Prometheus, /healthz and /readyz for health checks."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST


class EndpointError(Exception):
    """The endpoint cannot listen on its address."""


class Endpoint:
    """Serves for the duration of its `with` block."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.not_ready = "starting"
        """Why the pipeline is not ready; empty if it is ready."""
        endpoint = self

        class EndpointHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
                elif path == "/healthz":
                    self._answer(200, b"ok\n")
                elif path == "/readyz":
                    reason = endpoint.not_ready
                    self._answer(503 if reason else 200, f"{reason or 'ready'}\n".encode())
                else:
                    self._answer(404, b"not found\n")

            def _answer(self, status: int, body: bytes, content_type: str = "text/plain") -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *_: object) -> None:  # noqa: A002 - the interface's name
                """Do not log health checks and scrapes."""

        try:
            self._server = ThreadingHTTPServer((host, port), EndpointHandler)
        except OSError as error:
            raise EndpointError(
                f"Cannot serve metrics on {host}:{port}: {error.strerror or error}. Choose another port with"
                " --metrics-port; 0 picks a free one."
            ) from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="pipeline-endpoint", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
