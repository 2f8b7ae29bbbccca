"""The loads of `bench.report`: the requests of one client on one core to one server, and the measurements.

Every load keeps one request in flight on each of its connections. Small appends are sent by wrk if it is installed,
because a client in Python takes as much CPU time for them as the server. A response that is not a success ends the run,
because a rate with errors is meaningless; only after a 503 with `Retry-After`, which is counted, the connection pauses
and continues.
"""

from __future__ import annotations

import json
import math
import resource
import select
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench import append
from bench.servers import Running

TEXT = "text/plain"
JSON = "application/json"
SMALL = b"x" * 100
LARGE = b"x" * 2**20
BATCH = 500
TRIPS = 200
EVENTS = 20
BUSY_PAUSE_S = 0.005
"""The pause of a connection after a 503 with `Retry-After`."""
EVENTS_MAX_S = 4.0
"""A fan-out ends after this time, even with few events."""
CREATE_MAX_S = 300.0
PIPELINED = 50
HUGE = b"x" * (14 * 2**20)
ECHO = "bare echo"
CLIENT = "wrk" if shutil.which("wrk") else "Python"
"""What sends small appends."""
_JSON_BATCH = json.dumps([SMALL.decode()] * BATCH).encode()


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one load."""

    per_second: float
    """Appends, deliveries, messages or megabytes, depending on the load."""
    p50_us: float
    p99_us: float
    p999_us: float
    cpu_us: float
    """CPU time of the server per request, of all its threads."""
    busy: int = 0
    """Requests that were answered 503 with `Retry-After`, and sent again."""


class BusyError(SystemExit):
    """The server asks to send the request again later. Ends the run where a load does not do that."""


class Connection:
    """One HTTP/1.1 connection that counts responses without parsing them further."""

    def __init__(self, server: Running) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def close(self) -> None:
        self._socket.close()

    def create(self, path: str, content_type: str) -> bytes:
        self._socket.sendall(request("PUT", path, content_type, b""))
        return self.answer()

    def delete(self, path: str) -> None:
        """Delete a stream, so that the server frees the data of the load."""
        self._socket.sendall(f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        self.answer()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> bytes:
        """Read one response without a body; return its head."""
        while True:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                self._buffer += self._received()
                continue
            self._buffer = rest
            if head == b"0":  # An empty body in chunks, as Node sends it.
                continue
            if head[9:12] == b"503" and b"\r\nretry-after:" in head.lower():
                self._skip(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
                raise BusyError(f"refused: {head[:200]!r}")
            _check(head)
            return head

    def _skip(self, size: int) -> None:
        while len(self._buffer) < size:
            self._buffer += self._received()
        self._buffer = self._buffer[size:]

    def body(self) -> int:
        """Read one response with its body; return the number of bytes received."""
        return self.head_and_body()[1]

    def head_and_body(self) -> tuple[bytes, int]:
        """The same for a body of a known length or in chunks, with the head in lower case."""
        while b"\r\n\r\n" not in self._buffer:
            self._buffer += self._received()
        head, _, rest = self._buffer.partition(b"\r\n\r\n")
        _check(head)
        fields = head.lower()
        if b"content-length:" in fields:
            left = int(fields.partition(b"content-length:")[2].split(b"\r\n")[0]) - len(rest)
            received = len(rest)
            while left > 0:
                piece = self._received()
                received += len(piece)
                left -= len(piece)
        else:
            received, tail = len(rest), rest[-5:]
            while tail != b"0\r\n\r\n":
                piece = self._received()
                received += len(piece)
                tail = (tail + piece)[-5:]
        self._buffer = b""
        return fields, received

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def has_received(self, mark: bytes) -> bool:
        """Read available data; return whether the mark is in it. Everything before the mark is discarded."""
        self._buffer += self._received()
        if mark not in self._buffer:
            return False
        self._buffer = b""
        return True

    def until(self, mark: bytes) -> None:
        """Read up to and including a mark."""
        while mark not in self._buffer:
            self._buffer += self._received()
        self._buffer = self._buffer.partition(mark)[2]

    def _received(self) -> bytes:
        received = self._socket.recv(1_048_576)
        if not received:
            raise SystemExit("the server closed the connection")
        return received


def _check(head: bytes) -> None:
    if head[9:10] != b"2":
        raise SystemExit(f"refused: {head[:200]!r}")


@contextmanager
def connected(server: Running) -> Iterator[Connection]:
    connection = Connection(server)
    try:
        yield connection
    finally:
        connection.close()


def create_many(links: Sequence[Connection], paths: Sequence[str], content_type: str) -> None:
    """Create many streams, with many requests in flight on each connection, so that they share commits."""
    until_s = time.monotonic() + CREATE_MAX_S
    for start in range(0, len(paths), PIPELINED * len(links)):
        if time.monotonic() > until_s:
            raise SystemExit(f"{start:,} of {len(paths):,} streams were created in {CREATE_MAX_S:g} s")
        some = paths[start : start + PIPELINED * len(links)]
        shares = [(link, some[number :: len(links)]) for number, link in enumerate(links)]
        for link, share in shares:
            link.send(b"".join(request("PUT", path, content_type, b"") for path in share))
        for link, share in shares:
            for _ in share:
                link.answer()


def request(method: str, path: str, content_type: str, body: bytes) -> bytes:
    fields = f"Host: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"{method} {path} HTTP/1.1\r\n{fields}".encode() + body


Load = Callable[[Running, str, float], Sample]


def appends(
    connections: int, body: bytes = SMALL, content_type: str = TEXT, *, streams: int = 1, units: float = 1
) -> Load:
    """Appends over this many connections, each with one in flight; each counts as `units`."""

    def run(server: Running, path: str, seconds: float) -> Sample:
        with ExitStack() as opened:
            links = [opened.enter_context(connected(server)) for _ in range(connections)]
            paths = [f"{path}-{number}" for number in range(streams)]
            create_many(links, paths, content_type)
            messages = [request("POST", each, content_type, body) for each in paths]

            def units_of(link: Connection) -> float:
                link.answer()
                return units

            sample = repeat(server, links, messages, units_of, seconds)
            if streams == 1 and server.name != ECHO:
                links[0].delete(paths[0])
            return sample

    return run


def small_appends(connections: int, *, streams: int = 1) -> Load:
    """Appends of 100 bytes over this many connections, sent by wrk."""
    if CLIENT != "wrk":
        return appends(connections, streams=streams)

    def run(server: Running, path: str, seconds: float) -> Sample:
        with ExitStack() as opened:
            links = [opened.enter_context(connected(server)) for _ in range(32)]
            paths = [f"{path}-{number}" for number in range(streams)]
            create_many(links, paths, TEXT)
            load = append.Load(connections, streams, math.ceil(seconds), SMALL.decode(), TEXT)
            cpu_before_s = cpu_seconds(server.pid)
            sent = append.run_wrk(server.url, load, paths)
            cpu_us = (cpu_seconds(server.pid) - cpu_before_s) * 1e6 / sent["requests"]
            if streams == 1 and server.name != ECHO:
                links[0].delete(paths[0])
            per_second = sent["requests"] / sent["duration_us"] * 1e6
            return Sample(per_second, sent["p50_us"], sent["p99_us"], sent["p999_us"], cpu_us)

    return run


def replay(server: Running, path: str, seconds: float) -> Sample:
    """Catch-up reads of a stream of 8 MiB over 4 connections, in megabytes."""
    with ExitStack() as opened:
        links = [opened.enter_context(connected(server)) for _ in range(4)]
        links[0].create(path, TEXT)
        for _ in range(8):
            links[0].send(request("POST", path, TEXT, LARGE))
            links[0].answer()
        read = f"GET {path}?offset=-1 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        sample = repeat(server, links, [read], lambda link: link.body() / 1e6, seconds)
        links[0].delete(path)
        return sample


def repeat(
    server: Running,
    links: list[Connection],
    messages: list[bytes],
    units_of: Callable[[Connection], float],
    seconds: float,
) -> Sample:
    """Keep one request in flight on each connection until the time has passed; the messages are sent in turn."""
    took_s: list[float] = []
    units, turn, busy, waiting = 0.0, 0, 0, len(links)
    by_descriptor = {link.descriptor: link for link in links}
    sent_s: dict[int, float] = {}
    pausing: deque[tuple[float, int]] = deque()
    with select.epoll() as poller:
        cpu_before_s, began_s = cpu_seconds(server.pid), time.perf_counter()
        ends_s = began_s + seconds

        def send(descriptor: int) -> None:
            nonlocal turn, waiting
            sent_s[descriptor] = now_s = time.perf_counter()
            if now_s < ends_s:
                by_descriptor[descriptor].send(messages[turn % len(messages)])
                turn += 1
            else:
                waiting -= 1
                poller.unregister(descriptor)

        for descriptor in by_descriptor:
            poller.register(descriptor, select.EPOLLIN)
            send(descriptor)
        while waiting:
            ready = poller.poll(max(0.0, pausing[0][0] - time.perf_counter()) if pausing else 60)
            if not ready and not pausing:
                raise SystemExit("no response within 60 s")
            for descriptor, _event in ready:
                try:
                    units += units_of(by_descriptor[descriptor])
                except BusyError:
                    busy += 1
                    pausing.append((time.perf_counter() + BUSY_PAUSE_S, descriptor))
                else:
                    took_s.append(time.perf_counter() - sent_s[descriptor])
                    send(descriptor)
            while pausing and pausing[0][0] <= time.perf_counter():
                send(pausing.popleft()[1])
        elapsed_s = time.perf_counter() - began_s
        sample = sample_of(units / elapsed_s, took_s, cpu_seconds(server.pid) - cpu_before_s)
        return replace(sample, busy=busy)


def delivery(mode: str) -> Load:
    """The time from an append until a live reader receives it, one at a time."""

    def run(server: Running, path: str, _: float) -> Sample:
        took_s: list[float] = []
        with connected(server) as writer, connected(server) as reader:
            head = writer.create(path, TEXT)
            if mode == "sse":
                reader.send(_live_read(path, mode, "-1"))
                reader.until(b"upToDate")
            cpu_before_s, began_s = cpu_seconds(server.pid), time.perf_counter()
            for number in range(TRIPS):
                mark = b"%099d" % number
                if mode != "sse":
                    reader.send(_live_read(path, mode, _next_offset(head)))
                    time.sleep(0.001)  # So that the server usually has the long-poll before the append.
                sent_s = time.perf_counter()
                writer.send(request("POST", path, TEXT, mark))
                reader.until(mark)
                took_s.append(time.perf_counter() - sent_s)
                head = writer.answer()
            elapsed_s = time.perf_counter() - began_s
            return sample_of(TRIPS / elapsed_s, took_s, cpu_seconds(server.pid) - cpu_before_s)

    return run


def fan_out(readers: int) -> Load:
    """The time from an append until each of many SSE readers receives it, one append at a time."""

    def run(server: Running, path: str, _: float) -> Sample:
        took_s: list[float] = []
        allow_sockets(readers)
        with ExitStack() as opened:
            writer = opened.enter_context(connected(server))
            writer.create(path, TEXT)
            poller = opened.enter_context(select.epoll())
            links = follow(server, [path] * readers, opened, poller)
            cpu_before_s, began_s = cpu_seconds(server.pid), time.perf_counter()
            for number in range(EVENTS):
                mark = b"<%098d>" % number
                sent_s = time.perf_counter()
                writer.send(request("POST", path, TEXT, mark))
                waiting = set(links)
                while waiting:
                    for descriptor, _event in poller.poll(60):
                        if links[descriptor].has_received(mark):
                            took_s.append(time.perf_counter() - sent_s)
                            waiting.discard(descriptor)
                writer.answer()
                if time.perf_counter() - began_s > EVENTS_MAX_S:
                    break
            elapsed_s = time.perf_counter() - began_s
            cpu_s = cpu_seconds(server.pid) - cpu_before_s
            writer.delete(path)
            return sample_of(len(took_s) / elapsed_s, took_s, cpu_s)

    return run


def follow(
    server: Running, paths: Sequence[str], opened: ExitStack, poller: select.epoll | None = None
) -> dict[int, Connection]:
    """SSE readers at the end of these streams, each ready for the next event, by file descriptor."""
    links: dict[int, Connection] = {}
    for start in range(0, len(paths), PIPELINED):
        some = [opened.enter_context(connected(server)) for _ in paths[start : start + PIPELINED]]
        for link, path in zip(some, paths[start:], strict=False):
            link.send(_live_read(path, "sse", "now"))
        for link in some:
            link.until(b"upToDate")
            link.until(b"\n\n")
            links[link.descriptor] = link
            if poller is not None:
                poller.register(link.descriptor, select.EPOLLIN)
    return links


def allow_sockets(count: int) -> None:
    """Raise the limit on open files of this process for this many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + 200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 200, hard), hard))


def official(counts: tuple[int, ...], message: bytes, rounds: int) -> Load:
    """The requests of the official benchmark package: its client sends the first message of a burst alone, and joins
    the others into one request. Counted in messages."""

    def run(server: Running, path: str, _: float) -> Sample:
        took_s: list[float] = []
        with connected(server) as link:
            link.create(path, TEXT)
            requests = [request("POST", path, TEXT, message * count) for count in counts]
            cpu_before_s, began_s = cpu_seconds(server.pid), time.perf_counter()
            for _round in range(rounds):
                for each in requests:
                    sent_s = time.perf_counter()
                    link.send(each)
                    link.answer()
                    took_s.append(time.perf_counter() - sent_s)
            elapsed_s = time.perf_counter() - began_s
            cpu_s = cpu_seconds(server.pid) - cpu_before_s
            link.delete(path)
            return sample_of(rounds * sum(counts) / elapsed_s, took_s, cpu_s)

    return run


def round_trip(server: Running, path: str, _: float) -> Sample:
    """The official round trip: append a message, and receive it by a long-poll from the offset before it."""
    took_s: list[float] = []
    with connected(server) as link:
        head = link.create(path, TEXT)
        append = request("POST", path, TEXT, SMALL)
        cpu_before_s, began_s = cpu_seconds(server.pid), time.perf_counter()
        for _trip in range(TRIPS):
            poll = _live_read(path, "long-poll", _next_offset(head))
            sent_s = time.perf_counter()
            link.send(append)
            head = link.answer()
            link.send(poll)
            link.body()
            took_s.append(time.perf_counter() - sent_s)
        elapsed_s = time.perf_counter() - began_s
        return sample_of(TRIPS / elapsed_s, took_s, cpu_seconds(server.pid) - cpu_before_s)


def _live_read(path: str, mode: str, offset: str) -> bytes:
    return f"GET {path}?offset={offset}&live={mode} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def _next_offset(head: bytes) -> str:
    return head.lower().partition(b"stream-next-offset: ")[2].split(b"\r\n")[0].decode()


def sample_of(per_second: float, took_s: list[float], cpu_s: float) -> Sample:
    took_s.sort()
    count = len(took_s)

    def quantile_us(share: float) -> float:
        return took_s[min(count - 1, int(count * share))] * 1e6

    return Sample(per_second, quantile_us(0.5), quantile_us(0.99), quantile_us(0.999), cpu_s * 1e6 / count)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process with all its threads; 0 for a server without a known process."""
    if not pid:
        return 0.0
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def peak_bytes(pid: int) -> int:
    """The peak memory of a process; 0 if unknown."""
    return _memory(pid, "VmHWM:") if pid else 0


def resident_bytes(pid: int) -> int:
    """The current memory of a process, without mapped files."""
    return _memory(pid, "RssAnon:")


def _memory(pid: int, field: str) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition(field)[2].split()[0]) * 1024


LOADS: dict[str, tuple[str, Load]] = {
    "append, 1 connection": ("appends/s", small_appends(1)),
    "append, 8 connections": ("appends/s", small_appends(8)),
    "append, 32 connections": ("appends/s", small_appends(32)),
    "append, 128 connections": ("appends/s", small_appends(128)),
    "spread over 500 streams": ("appends/s", small_appends(64, streams=500)),
    "spread over 10,000 streams": ("appends/s", small_appends(64, streams=10_000)),
    "JSON, batches of 500": ("messages/s", appends(8, _JSON_BATCH, JSON, units=BATCH)),
    "1 MiB bodies": ("MB/s", appends(8, LARGE, units=len(LARGE) / 1e6)),
    "14 MiB bodies": ("MB/s", appends(2, HUGE, units=len(HUGE) / 1e6)),
    "round trip over SSE": ("trips/s", delivery("sse")),
    "long-poll delivery": ("trips/s", delivery("long-poll")),
    "SSE fan-out, 1 reader": ("deliveries/s", fan_out(1)),
    "SSE fan-out, 100 readers": ("deliveries/s", fan_out(100)),
    "SSE fan-out, 500 readers": ("deliveries/s", fan_out(500)),
    "SSE fan-out, 2,000 readers": ("deliveries/s", fan_out(2000)),
    "replay": ("MB/s", replay),
    "official: round trip": ("trips/s", round_trip),
    "official: small messages": ("messages/s", official((1, 74), SMALL, 14)),
    "official: large messages": ("messages/s", official((1, 14), b"x" * 1_000_000, 4)),
}
"""The unit of the rate of each load, and the load itself."""
ECHOED = tuple(name for name in LOADS if name.startswith("append"))
"""The loads that a bare echo can serve: they show the limit of the generator."""
