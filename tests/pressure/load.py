"""A server under load for one operation, and the description of such an operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tests.http.raw import RawConnection, RawResponse, encode
from tests.serving import Server
from tests.waiting import wait_until

MIB = 1024 * 1024
TEXT = {"Content-Type": "text/plain"}
JSON = {"Content-Type": "application/json"}
WINDOW = 24
"""The most requests in flight on one connection while input is prepared."""
PATIENCE_S = 120.0


class Load:
    """A server under one operation, and the fraction of the full input that is used."""

    def __init__(self, server: Server, share: float) -> None:
        self.server = server
        self.share = share

    def size(self, full: int, least: int = 1) -> int:
        return max(least, int(full * self.share))

    @contextmanager
    def connect(self) -> Iterator[RawConnection]:
        with RawConnection(self.server) as connection:
            connection.socket.settimeout(PATIENCE_S)
            yield connection

    def send(self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b"") -> RawResponse:
        """Send one request on a new connection."""
        with self.connect() as connection:
            return connection.request(method, target, headers=headers, body=body)

    def must(self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b"") -> RawResponse:
        """Send a request that must succeed, once the disk has caught up with earlier operations."""
        response = wait_until(lambda: self.send(method, target, headers, body), lambda found: found.status != 503)
        assert response.status < 300, f"{method} {target}: {response.status} {response.body[:300]!r}"
        return response

    def bucket(self, path: str) -> None:
        """Create a bucket unless an earlier operation did."""
        assert self.send("PUT", path).status in {201, 409}

    def many(self, requests: Iterable[tuple[str, str, dict[str, str], bytes]]) -> None:
        """Send all of these requests, pipelined a few at a time; each must succeed, if need be after `Retry-After`."""
        remaining = iter(requests)
        with self.connect() as connection:
            while window := list(islice(remaining, WINDOW)):
                for method, target, headers, body in window:
                    connection.send(encode(method, target, headers=headers, body=body))
                refused = []
                for request in window:
                    response = connection.response()
                    if (pause_s := response.header("retry-after")) is not None:
                        refused.append((float(pause_s), request))
                    else:
                        assert response.status < 300, f"{response.status} {response.body[:300]!r}"
                if refused:
                    time.sleep(max(pause_s for pause_s, _ in refused))
                for _, request in refused:
                    self.must(*request)

    def drain(self, target: str, *, until: bytes = b"", headers: dict[str, str] | None = None) -> int:
        """Read a response as fast as possible, up to these bytes or its end; return its size."""
        with self.connect() as connection:
            connection.send(encode("GET", target, headers={**(headers or {}), "Connection": "close"}))
            total, tail = 0, b""
            while data := connection.socket.recv(MIB):
                total += len(data)
                tail = (tail + data)[-200 - len(data) :] if until else b""
                if until and until in tail:
                    break
            return total

    def fill(self, path: str, total: int, piece: int) -> None:
        """Create a text stream of this many bytes in messages of `piece` bytes."""
        self.must("PUT", path, TEXT)
        body = (b"m" * (piece - 1)) + b"\n"
        self.many(("POST", path, TEXT, body) for _ in range(max(1, total // piece)))

    def fill_json(self, path: str, count: int) -> None:
        """Create a JSON stream of this many one-byte messages."""
        self.must("PUT", path, JSON)
        batch = b"[" + b",".join([b"0"] * 2_000) + b"]"
        self.many(("POST", path, JSON, batch) for _ in range(max(1, count // 2_000)))

    def together(self, work: Callable[[int], object], count: int) -> None:
        """Run the same work on several connections at once."""
        failures: list[BaseException] = []

        def run(number: int) -> None:
            try:
                work(number)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def no_preparation(_: Load) -> None:
    """Do nothing: the operation needs no preparation."""


@dataclass(frozen=True)
class Operation:
    name: str
    worst: str
    """A description of the worst legal input, for the table."""
    drive: Callable[[Load], object]
    prepare: Callable[[Load], object] = no_preparation
    mode: str = "memory"
    settings: dict[str, Any] = field(default_factory=dict)
    share: float = 0.05
    """The fraction of the input that the quick test uses."""
    write_store: Callable[[Path, float], object] | None = None
    """Writes the data directory that the server starts with, for this fraction of the input."""
