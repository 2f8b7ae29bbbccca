"""A real Envoy for a test, with the configuration of the stack, in front of a real server or an echo server.

Invariant: after the `with` block, Envoy and the servers behind it have exited.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from headwater.config import Settings, load_settings
from headwater.stack.envoy import EnvoyEndpoints, Upstream, envoy_config, find_envoy, validate
from headwater.stack.jwks import JwksServer
from headwater.stack.keys import Algorithm, KeyRing
from headwater.stack.tokens import TokenClaims, TokenFlaw, mint, sign
from tests.http_handlers import HandlerServer, QuietHandler
from tests.ports import free_port
from tests.waiting import wait_until

START_TIMEOUT_SECS = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A response received over a raw connection."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The error `code` from the policy or the server; empty for Envoy's own responses."""
        try:
            return str(json.loads(self.body).get("code", ""))
        except ValueError:
            return ""


@dataclass(frozen=True, slots=True)
class Proxied:
    """Envoy at `url`; `token()` creates tokens, `raw()` sends exact requests."""

    port: int
    admin_port: int
    ring: KeyRing
    settings: Settings
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def token(
        self,
        *flaws: TokenFlaw,
        sub: str = "alice",
        scope: str = "",
        ns: str = "",
        ttl: int = 3600,
        alg: Algorithm = Algorithm.RS256,
    ) -> str:
        auth = self.settings.auth
        claims = TokenClaims(auth.issuer, auth.audience_list[0], sub, scope, ns, auth.namespace_claim, ttl)
        return mint(self.ring, claims, alg, frozenset(flaws))

    def signed(self, **claims: object) -> str:
        """A token with exactly these claims added to the valid ones, of any type."""
        auth = self.settings.auth
        kid, key = self.ring.signing_key(Algorithm.ES256)
        good = {"iss": auth.issuer, "aud": auth.audience_list[0], "sub": "alice", "exp": int(time.time()) + 3600}
        return sign({"alg": "ES256", "typ": "JWT", "kid": kid}, {**good, **claims}, key)

    def raw(
        self, method: str, target: str, *lines: str, token: str | None = None, body: bytes = b"", port: int = 0
    ) -> Answer:
        """Send one HTTP/1.1 request with exactly this target and these header lines."""
        head = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
        if token is not None:
            head.append(f"Authorization: Bearer {token}")
        request = "\r\n".join([*head, *lines, "", ""]).encode("latin-1") + body
        with socket.create_connection(("127.0.0.1", port or self.port), timeout=60) as connection:
            connection.sendall(request)
            received = b""
            # Envoy may keep a finished connection open for a second, so do not wait for its end.
            while not _is_whole(received, method) and (piece := connection.recv(65536)):
                received += piece
        return parse(received)


def _is_whole(received: bytes, method: str) -> bool:
    head, blank, body = received.partition(b"\r\n\r\n")
    if not blank:
        return False
    lowered = head.lower()
    if method == "HEAD" or head.split()[1] in {b"204", b"304"}:
        return True
    length = re.search(rb"content-length: *(\d+)", lowered)
    if length is not None:
        return len(body) >= int(length[1])
    return b"transfer-encoding: chunked" in lowered and body.endswith(b"0\r\n\r\n")


def parse(received: bytes) -> Answer:
    head, _, body = received.partition(b"\r\n\r\n")
    status_line, *header_lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in header_lines)}
    if headers.get("transfer-encoding") == "chunked":
        whole, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            whole, rest = whole + rest[:length], rest[length + 2 :]
        body = whole
    return Answer(int(status_line.split()[1]), headers, body)


def settings_of(**env: str) -> Settings:
    return load_settings(None, None, env, Path("/nonexistent")).settings


@contextmanager
def proxied(
    upstream: int,
    *,
    jwks: Path | str | None = None,
    ring: KeyRing | None = None,
    shapes: int | None = None,
    **env: str,
) -> Iterator[Proxied]:
    """Envoy in front of the server at this local port, with the settings of these DS_… variables."""
    with tempfile.TemporaryDirectory(prefix="headwater-envoy-") as temporary:
        directory = Path(temporary)
        port, admin = free_port(), free_port()
        settings = settings_of(
            **{"DS_PROXY__PORT": str(port), "DS_PROXY__ADMIN_PORT": str(admin), "DS_PROXY__THREADS": "1", **env}
        )
        ring = ring or KeyRing(directory / "keys")
        ring.ensure()
        own_keys = JwksServer(settings.auth.jwks_file or ring.jwks_file)
        config = directory / "envoy.json"
        endpoints = EnvoyEndpoints(
            Upstream("127.0.0.1", upstream),
            jwks or own_keys.url,
            shapes=Upstream("127.0.0.1", shapes) if shapes is not None else None,
        )
        config.write_text(envoy_config(settings, endpoints))
        executable = find_envoy(settings)
        validate(executable, config)
        log = directory / "envoy.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [executable, "-c", config, "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"],
                stdout=file,
                stderr=file,
            )
        try:
            wait_for(f"http://127.0.0.1:{admin}/ready", process, log)
            yield Proxied(port, admin, ring, settings, log)
        finally:
            process.terminate()
            process.wait(20)
            own_keys.close()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(url).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers, what=f"{url} answers", limit_s=START_TIMEOUT_SECS)


@contextmanager
def echoing() -> Iterator[int]:
    """Run a server that returns every request as JSON; yields its port."""

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            request = {
                "method": self.command,
                "path": self.path,
                "headers": [list(item) for item in self.headers.items()],
            }
            body = json.dumps(request).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_OPTIONS = _answer

    with HandlerServer(Handler).running() as server:
        yield server.server_port
