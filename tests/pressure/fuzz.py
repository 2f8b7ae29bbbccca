"""Pipelining and segmentation against a model: random requests, split at random bytes, read fast, slowly or not at all.

    python -m tests.pressure.fuzz --requests 1000000 --seed 7 [--mode file-durable] [--depth 2000]

Every client has its own connection and a `Script`. Each response is parsed by h11, which shares no code with the
server, and must be the model's response to the next request. After a connection is cut, the state must be explained by
some prefix of the sent requests that includes all that got a response. The seed determines the requests and the splits;
run with the same seed to repeat them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import h11

from tests.crash.wire import Client, Lost, NotSent
from tests.offsets import offset_of
from tests.pressure.script import TEXT, Mismatch, Script, Step, Visible, Wake
from tests.serving import serve

DEPTH_MAX = 2_000
"""Requests sent before the first response is awaited."""
PATIENCE_BEATS = 2_000
"""A request counts as unanswered after the server has responded to this many others. A time limit would blame the
server for a busy machine."""
LANES = 16
WAKE_EVERY_S = (0.002, 0.03)
END_S = 90.0


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    ends: bool
    """Whether the server closes the connection after it."""


class Replies:
    """Parses received bytes to responses with h11."""

    def __init__(self) -> None:
        self._h11 = h11.Connection(h11.CLIENT)
        self._head: h11.Response | None = None
        self._body = bytearray()
        self._asked = False

    def feed(self, data: bytes) -> None:
        self._h11.receive_data(data)

    def next(self, method: str) -> Reply | None:
        """The response to a request with this method, once it is complete."""
        connection = self._h11
        try:
            if not self._asked:
                connection.send(h11.Request(method=method, target="/", headers=[("Host", "localhost")]))
                connection.send(h11.EndOfMessage())
                self._asked = True
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    return None
                if isinstance(event, h11.Response):
                    self._head = event
                elif isinstance(event, h11.Data):
                    self._body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    return self._finish()
                elif not isinstance(event, h11.InformationalResponse):
                    raise Mismatch(f"the connection ended instead of a response to {method} ({event})")
        except h11.ProtocolError as error:
            # Also a local one: an earlier response has announced the end of the connection.
            raise Mismatch(f"h11 cannot parse the response to {method}: {error}") from error

    def _finish(self) -> Reply:
        assert self._head is not None
        headers: dict[str, str] = {}
        for raw_name, raw_value in self._head.headers:
            name, value = raw_name.decode(), raw_value.decode("latin-1")
            if name in headers:
                raise Mismatch(f"{name} was sent twice")
            headers[name] = value
        ends = self._h11.their_state is h11.MUST_CLOSE
        reply = Reply(self._head.status_code, headers, bytes(self._body), ends)
        self._head, self._body, self._asked = None, bytearray(), False
        if not ends:
            self._h11.start_next_cycle()
        return reply


def compare(step: Step, reply: Reply) -> None:
    """Raise a `Mismatch` if this is not the model's response."""
    if reply.status != step.status:
        raise Mismatch(f"status {reply.status} instead of {step.status}; {reply.body[:300]!r}")
    for key, wanted in step.facts.items():
        try:
            found = _FACTS[key](reply)
        except KeyError as missing:
            raise Mismatch(f"there is no {missing} instead of {key} {wanted!r}; {reply.body[:300]!r}") from None
        if found != wanted:
            raise Mismatch(f"{key} is {found!r} instead of {wanted!r}")


def _pair(reply: Reply) -> tuple[int, int]:
    return int(reply.headers["producer-epoch"]), int(reply.headers["producer-seq"])


_FACTS: dict[str, Any] = {
    "next": lambda reply: offset_of(reply.headers["stream-next-offset"]),
    "closed": lambda reply: reply.headers.get("stream-closed") == "true",
    "up_to_date": lambda reply: reply.headers.get("stream-up-to-date") == "true",
    "type": lambda reply: reply.headers["content-type"],
    "body": lambda reply: reply.body,
    "producer": _pair,
    "epoch": lambda reply: int(reply.headers["producer-epoch"]),
    "expected": lambda reply: int(reply.headers["producer-expected-seq"]),
    "received": lambda reply: int(reply.headers["producer-received-seq"]),
}


@dataclass
class Run:
    """The state that all clients of one run share."""

    port: int
    seed: int
    requests: int
    depth_max: int = DEPTH_MAX
    lanes: int = LANES
    running: bool = True
    sent: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    beats: int = 0
    """Responses on connections that send one request at a time."""
    patience: dict[asyncio.Timeout, int] = field(default_factory=dict)
    """By pending batch, the beat at which it counts as unanswered."""
    _clients: list[Client] = field(default_factory=list)

    def client(self) -> Client:
        """A connection that is closed at the end of the run at the latest."""
        client = Client(self.port)
        self._clients.append(client)
        return client

    def beat(self) -> None:
        self.beats += 1
        for limit, last in self.patience.items():
            if self.beats == last:
                limit.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        await asyncio.sleep(0.01)


async def fuzz(run: Run) -> Counter[str]:
    """Send the requests; the first wrong response ends the run with a `Mismatch` that names seed and client."""
    wakes = [Wake(f"/v1/stream/wake/{run.seed}/{number}") for number in range(2)]
    await asyncio.gather(*(_create(run, wake) for wake in wakes))
    lanes = [Lane(run, number, wakes[number % len(wakes)]) for number in range(run.lanes)]
    try:
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(feed(run, wake, number)) for number, wake in enumerate(wakes)]
            beside += [group.create_task(listen(run, wake, number)) for number, wake in enumerate(wakes * 2)]
            async with asyncio.TaskGroup() as sending:
                for lane in lanes:
                    sending.create_task(lane.drive())
            run.running = False
            await asyncio.wait_for(asyncio.gather(*beside), END_S)
    except BaseExceptionGroup as group_error:
        raise _first(group_error) from None
    finally:
        await run.close()
    run.counts["requests"] = run.sent
    return run.counts


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = next((each for each in error.exceptions if isinstance(each, Mismatch)), error.exceptions[0])
    return error


async def _create(run: Run, wake: Wake) -> None:
    client = run.client()
    reply = await client.request("PUT", wake.path, {"Content-Type": TEXT})
    assert reply.status in {200, 201}, reply
    client.close()


class Lane:
    """One pipelining client."""

    def __init__(self, run: Run, number: int, wake: Wake) -> None:
        self._run = run
        self._number = number
        self._wake = wake
        self._dice = random.Random(f"{run.seed}/{number}")
        self._position = 0
        """The request of the batch that is being answered."""
        self._script = Script(self._dice, f"fuzz/{run.seed}/{number}", wake)

    async def drive(self) -> None:
        run = self._run
        try:
            while run.sent < run.requests:
                await self._one_connection()
        except Mismatch as error:
            error.add_note(f"seed {run.seed}, client {self._number}")
            raise

    async def _one_connection(self) -> None:
        dice = self._dice
        run = self._run
        run.counts["connections"] += 1
        pipe = await Pipe.open(run.port, small_window=dice.random() < 0.3)
        try:
            for _ in range(dice.randrange(1, 6)):
                depth = min(int(dice.paretovariate(0.55)), run.depth_max)
                steps = [self._script.step() for _ in range(depth)]
                run.sent += depth
                run.counts["deepest"] = max(run.counts["deepest"], depth)
                (way,) = dice.choices(("eager", "slow", "paused", "vanish"), (72, 10, 10, 8))
                run.counts[way] += 1
                if way == "vanish":
                    await self._vanish(pipe, steps)
                    return
                await self._exchange(pipe, steps, way)
        finally:
            pipe.close()

    async def _exchange(self, pipe: Pipe, steps: list[Step], way: str) -> None:
        acknowledged = self._wake.acknowledged
        async with self._in_time(pipe, steps, way):
            sending = asyncio.create_task(pipe.send(cut(self._dice, steps)))
            try:
                if way == "paused":
                    # Nothing is read until all is sent, or until it is clear that the server waits for the reader.
                    await asyncio.wait([sending], timeout=self._dice.uniform(0.0, 0.3))
                for position, step in enumerate(steps):
                    await self._judge(pipe, step, acknowledged, way, position)
                    if position % 50 == 49:
                        await asyncio.sleep(0)  # A deep batch that is answered at once must not hold up the others.
                await sending
            finally:
                sending.cancel()
        self._run.counts["answered"] += len(steps)
        pipe.before += len(steps)

    @asynccontextmanager
    async def _in_time(self, pipe: Pipe, steps: list[Step], way: str) -> AsyncIterator[None]:
        """Fail if there is no response, with the waiting request and what its connection has received."""
        self._position = 0
        try:
            async with asyncio.timeout(None) as limit:
                self._run.patience[limit] = self._run.beats + PATIENCE_BEATS + 10 * len(steps)
                try:
                    yield
                finally:
                    del self._run.patience[limit]
        except TimeoutError:
            step = steps[min(self._position, len(steps) - 1)]
            raise Mismatch(
                f"no response to request {self._position} of {len(steps)} ({way}): {step.data[:300]!r};"
                f" {pipe.received} bytes received, {pipe.sent} of {sum(len(each.data) for each in steps)} sent,"
                f" small window: {pipe.small_window}, requests before: {pipe.before}"
            ) from None

    async def _judge(self, pipe: Pipe, step: Step, acknowledged: int, way: str, position: int) -> None:
        self._position = position
        try:
            reply = await pipe.reply(step.method, slow=way == "slow", dice=self._dice)
            if step.waits_from is None:
                compare(step, reply)
            else:
                self._run.counts["waits"] += 1
                judge_wait(self._wake, step.waits_from, acknowledged, reply)
        except Mismatch as error:
            what = f"{step.method} {step.target} {step.body[:60]!r}"
            raise Mismatch(f"request {position} ({way}): {what}: {error!s}") from error

    async def _vanish(self, pipe: Pipe, steps: list[Step]) -> None:
        """Read some responses, cut the connection, and check that the resulting state is possible."""
        dice = self._dice
        acknowledged = self._wake.acknowledged
        read = dice.randrange(len(steps) + 1)
        sending = asyncio.create_task(pipe.send(cut(dice, steps)))
        try:
            async with self._in_time(pipe, steps, "vanish"):
                for position, step in enumerate(steps[:read]):
                    await self._judge(pipe, step, acknowledged, "vanish", position)
                await asyncio.wait([sending], timeout=dice.uniform(0.0, 0.02))
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending
        pipe.close(reset=dice.random() < 0.5)
        self._run.counts["answered"] += read
        possible = {name: self._possible(name, steps, read) for name in self._script.names}
        await self._check_stored(possible)
        self._script.start_over()

    def _possible(self, name: str, steps: list[Step], answered: int) -> list[Visible]:
        """The possible states of a stream: after the last request with a response, or after any later one."""
        touched = [(number, step) for number, step in enumerate(steps) if step.name == name]
        if not touched:
            return [self._script.visible(name)]
        known = [step.after for number, step in touched if number < answered] or [touched[0][1].before]
        later = [step.after for number, step in touched if number >= answered]
        return [state for state in (known[-1], *later) if state is not None]

    async def _check_stored(self, possible: dict[str, list[Visible]]) -> None:
        client = self._run.client()
        try:
            for name, states in possible.items():
                reply = await client.request("GET", f"/v1/stream/{name}?offset=-1")
                if reply.status not in {200, 404}:
                    raise Mismatch(f"after a cut connection {name} answers {reply.status} {reply.body[:300]!r}")
                body = reply.body if reply.status == 200 else None
                closed = reply.headers.get("stream-closed") == "true"
                if not any(state.body() == body and state.closed == closed for state in states):
                    raise Mismatch(
                        f"after a cut connection {name} is {body[-200:] if body is not None else None!r}"
                        f" (closed: {closed}), which is not one of its {len(states)} possible states"
                    )
                self._run.counts["settled"] += 1
                await client.request("DELETE", f"/v1/stream/{name}")
        finally:
            client.close()


class Pipe:
    """A socket on which split requests are sent and responses awaited."""

    def __init__(self, connected: socket.socket, *, small_window: bool) -> None:
        self._socket = connected
        self.small_window = small_window
        self.before = self.sent = self.received = 0
        self._loop = asyncio.get_running_loop()
        self._replies = Replies()

    @classmethod
    async def open(cls, port: int, *, small_window: bool) -> Pipe:
        connected = socket.socket()
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if small_window:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            await asyncio.get_running_loop().sock_connect(connected, ("127.0.0.1", port))
        except BaseException:
            connected.close()
            raise
        return cls(connected, small_window=small_window)

    async def send(self, pieces: Iterator[bytes]) -> None:
        self.sent = 0
        for number, piece in enumerate(pieces):
            await self._loop.sock_sendall(self._socket, piece)
            self.sent += len(piece)
            if number % 4 == 3:
                await asyncio.sleep(0)

    async def reply(self, method: str, *, slow: bool, dice: random.Random) -> Reply:
        while (found := self._replies.next(method)) is None:
            if slow:
                await asyncio.sleep(dice.uniform(0, 0.002))
            data = await self._loop.sock_recv(self._socket, 700 if slow else 262_144)
            self.received += len(data)
            self._replies.feed(data)
        return found

    def close(self, *, reset: bool = False) -> None:
        if reset and self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


def cut(dice: random.Random, steps: list[Step]) -> Iterator[bytes]:
    """Split the bytes of all requests at random positions, into at most a few hundred pieces."""
    data = b"".join(step.data for step in steps)
    (way,) = dice.choices(("whole", "few", "many", "bytes"), (40, 30, 25, 5))
    count = {"whole": 0, "few": dice.randrange(1, 5), "many": min(200, len(data) // 20), "bytes": 300}[way]
    if way == "bytes":
        # Byte by byte somewhere in the middle.
        begin = dice.randrange(max(1, len(data) - count))
        marks = range(begin, min(begin + count, len(data)))
    else:
        marks = sorted(dice.randrange(len(data) + 1) for _ in range(count))  # type: ignore[assignment]
    at = 0
    for mark in (*marks, len(data)):
        if mark > at:
            yield data[at:mark]
            at = mark


def judge_wait(wake: Wake, start: int, acknowledged: int, reply: Reply) -> None:
    """Check a long-poll on a growing stream: everything from its offset, or 204 if there was nothing."""
    if reply.status == 204:
        if acknowledged > start:
            raise Mismatch(f"204 from message {start} on, when {acknowledged} were acknowledged")
        return
    if reply.status != 200:
        raise Mismatch(f"{reply.status} {reply.body[:200]!r} from a long-poll")
    end = wake.count_at(reply.headers["stream-next-offset"])
    if end <= start or reply.body != wake.between(start, end):
        raise Mismatch(f"from {start} to {end}: {reply.body[:200]!r}")


async def feed(run: Run, wake: Wake, number: int) -> None:
    """Append to the wake stream at random times, on a separate connection."""
    dice = random.Random(f"{run.seed}/feed/{number}")
    client = run.client()
    while run.running:
        await asyncio.sleep(dice.uniform(*WAKE_EVERY_S))
        reply = await client.request("POST", wake.path, {"Content-Type": TEXT}, wake.next_message())
        if reply.status != 204 or offset_of(reply.offset) != wake.token(wake.sent):
            raise Mismatch(f"append to {wake.path}: {reply}")
        wake.acknowledged = wake.sent
        run.beat()
    client.close()


async def listen(run: Run, wake: Wake, number: int) -> None:
    """Follow the wake stream by server-sent events, sometimes slowly, and disconnect midway."""
    dice = random.Random(f"{run.seed}/listen/{number}")
    client = run.client()
    while run.running:
        at = dice.choice((0, wake.acknowledged))
        left = dice.randrange(2, 60)
        data = b""
        url = f"{wake.path}?offset={wake.token(at)}&live=sse"
        with suppress(Lost, NotSent):
            async with aclosing(client.events(url)) as events:
                async for event in events:
                    if event.kind == "data":
                        data += event.data.encode()
                        continue
                    end = wake.count_at(json.loads(event.data)["streamNextOffset"])
                    if data != wake.between(at, end):
                        raise Mismatch(f"events from {at} to {end} carry {data[:200]!r}")
                    run.counts["events"] += 1
                    at, data, left = end, b"", left - 1
                    if not left or not run.running:
                        break
                    if dice.random() < 0.1:
                        await asyncio.sleep(dice.uniform(0, 0.1))
        client.close()


def run_against_server(
    *,
    requests: int,
    seed: int,
    mode: str = "memory",
    depth: int = DEPTH_MAX,
    program: tuple[str, ...] = ("headwater",),
    pure: bool = False,
) -> Counter[str]:
    """Start a server, send the requests, stop it."""
    settings: dict[str, Any] = {
        "DS_STORAGE__MODE": mode,
        "DS_STORAGE__SEGMENT_BYTES": "262144",
        "DS_STORAGE__HOT_TAIL_BYTES": "262144",
        "DS_LIMITS__MAX_STREAM_BYTES": "0",
        "DS_SERVER__LONG_POLL_TIMEOUT_SECS": "0.3",
        "DS_SERVER__SSE_RECONNECT_INTERVAL_SECS": "1",
        # The clients may be slow because the machine is.
        "DS_SERVER__READ_TIMEOUT_SECS": "3600",
        "DS_SERVER__IDLE_TIMEOUT_SECS": "3600",
        "DS_SERVER__WRITE_TIMEOUT_SECS": "3600",
    }
    if pure:
        settings["HEADWATER_PURE"] = "1"
    with serve(program=program, **settings) as server:
        run = Run(server.port, seed, requests, depth)
        try:
            counts = asyncio.run(fuzz(run))
        except BaseException as error:
            error.add_note(f"after {run.sent} requests; the server's log ends:\n{server.log()[-3000:]}")
            raise
        log = server.log()
        if "Traceback" in log:
            raise Mismatch(f"the server logged an error:\n{log[-3000:]}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    parser.add_argument("--mode", default="memory")
    parser.add_argument("--depth", type=int, default=DEPTH_MAX)
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)  # noqa: T201 - replays need it, also after a crash
    began = time.monotonic()
    counts = run_against_server(requests=chosen.requests, seed=chosen.seed, mode=chosen.mode, depth=chosen.depth)
    print(json.dumps({**counts, "seconds": round(time.monotonic() - began, 1)}))  # noqa: T201


if __name__ == "__main__":
    main()
