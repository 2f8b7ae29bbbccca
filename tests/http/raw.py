"""A connection that sends exactly the bytes it is given, with its own HTTP/1.1 response parser.

Invariant: the parser is strict. A response that is not framed according to RFC 9112 is an AssertionError, so wrong
framing cannot go unnoticed because a client library tolerates it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from tests.serving import Server

TIMEOUT_SECS = 60.0
_BODYLESS = (204, 304)


class ConnectionEnded(AssertionError):
    """The server closed the connection before the response was complete."""


@dataclass(frozen=True, slots=True)
class RawResponse:
    version: str
    status: int
    fields: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        found = self.all_of(name)
        assert len(found) <= 1, f"{name} was sent {len(found)} times"
        return found[0] if found else None

    def all_of(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name.lower()]


class RawConnection:
    """One TCP connection to the server."""

    def __init__(self, server: Server, *, tls: ssl.SSLContext | None = None) -> None:
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_SECS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = plain if tls is None else tls.wrap_socket(plain, server_hostname="localhost")
        self._buffer = b""
        self._ended = False

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def half_close(self) -> None:
        """Close the sending side, and continue reading."""
        self.socket.shutdown(socket.SHUT_WR)

    def request(
        self,
        method: str,
        target: str,
        *,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        version: str = "1.1",
    ) -> RawResponse:
        self.send(encode(method, target, headers=headers, body=body, version=version))
        return self.response(head=method == "HEAD")

    def response(self, *, head: bool = False) -> RawResponse:
        """The next response on the connection, read to its exact end."""
        version, status, fields = self.response_head()
        if head or status in _BODYLESS or 100 <= status < 200:
            return RawResponse(version, status, fields, b"")
        return RawResponse(version, status, fields, b"".join(self.body_pieces(fields)))

    def response_head(self) -> tuple[str, int, tuple[tuple[str, str], ...]]:
        head = self._take_until(b"\r\n\r\n").decode("latin-1")
        first, *lines = head.split("\r\n")
        version, status, _ = [*first.split(" ", 2), ""][:3]
        assert version in ("HTTP/1.1", "HTTP/1.0"), first
        fields = []
        for line in lines:
            name, colon, value = line.partition(":")
            assert colon, f"not a header field: {line!r}"
            assert name == name.strip(), f"white space around a header's name: {line!r}"
            fields.append((name.lower(), value.strip()))
        return version, int(status), tuple(fields)

    def body_pieces(self, fields: tuple[tuple[str, str], ...]) -> Iterator[bytes]:
        """Yield the body as it is received, without its framing."""
        named = dict(fields)
        assert not ("content-length" in named and "transfer-encoding" in named), "two framings at once"
        if named.get("transfer-encoding") == "chunked":
            while size := int(self._take_until(b"\r\n").split(b";")[0], 16):
                yield self.take(size)
                assert self.take(2) == b"\r\n", "a chunk does not end with CRLF"
            assert self._take_until(b"\r\n") == b"", "unexpected trailer"
        elif "content-length" in named:
            yield self.take(int(named["content-length"]))
        else:
            while True:
                if self._buffer:
                    piece, self._buffer = self._buffer, b""
                    yield piece
                if not self._fill():
                    return

    def ends(self, *, within_secs: float = TIMEOUT_SECS) -> bool:
        """Whether the server closes the connection in time without sending anything else."""
        self.socket.settimeout(within_secs)
        try:
            return not self._buffer and not self._fill()
        except TimeoutError:
            return False
        finally:
            self.socket.settimeout(TIMEOUT_SECS)

    def quiet(self, *, for_secs: float) -> bool:
        """Whether nothing is received for this long, neither bytes nor the end."""
        self.socket.settimeout(for_secs)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(TIMEOUT_SECS)
        return False

    def has_nothing(self) -> bool:
        """Whether nothing has been received so far, for use when a premature answer would have been received."""
        return self.quiet(for_secs=0.001)

    def take(self, size: int) -> bytes:
        """Read exactly this many bytes, without parsing them."""
        while len(self._buffer) < size:
            if not self._fill():
                raise ConnectionEnded(f"the connection ended {size - len(self._buffer)} bytes too early")
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _take_until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            if not self._fill():
                raise ConnectionEnded(f"the connection ended before {mark!r}; it had {self._buffer[:200]!r}")
        taken, _, self._buffer = self._buffer.partition(mark)
        return taken

    def _fill(self) -> bool:
        if self._ended:
            return False
        try:
            received = self.socket.recv(262_144)
        except ConnectionResetError:
            received = b""
        self._ended = not received
        self._buffer += received
        return not self._ended


def encode(
    method: str, target: str, *, headers: dict[str, str] | None = None, body: bytes = b"", version: str = "1.1"
) -> bytes:
    """A request as bytes, with Host, and with Content-Length where there is a body."""
    fields = {"Host": "localhost", **(headers or {})}
    if body and "Transfer-Encoding" not in fields:
        fields.setdefault("Content-Length", str(len(body)))
    lines = [f"{method} {target} HTTP/{version}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked(*pieces: bytes) -> bytes:
    """A chunked body of these pieces."""
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@contextmanager
def connect(server: Server) -> Iterator[RawConnection]:
    with RawConnection(server) as connection:
        yield connection


def request_path(server: Server, method: str, path: str) -> tuple[int, bytes]:
    """Send the path unchanged, which a client library would normalize; return the status and the body."""
    with connect(server) as connection:
        answer = connection.request(method, path, headers={"Content-Type": "text/plain"} if method == "PUT" else {})
        return answer.status, answer.body
