"""State that the clients of a crash test share: the server's port, requests with retries, and the expected content.

A message has one of three outcomes. Acknowledged: it is present, complete, in order and once. Unknown (the answer was
lost): present and complete, or absent. Rejected: absent. `StreamHistory` records the outcomes and checks what is read.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tests.crash.wire import Client, Lost, NotSent, Reply

RETRY_S = 0.003
TEXT = {"Content-Type": "text/plain"}
WRITES = ("PUT", "POST", "DELETE")


class Violation(AssertionError):
    """The server broke one of its guarantees."""


def message(who: str, number: int) -> bytes:
    """Build a writer's n-th message. Some are large, so that the server starts new segments and checkpoints."""
    size = 12_000 if number % 97 == 96 else number * 31 % 120
    return f"{who}:{number}:".encode() + b"x" * size + b";"


class StreamHistory:
    """What clients sent to one stream, and which answers they received."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tried: Counter[str] = Counter()
        """Messages that each producer has started to send."""
        self.acknowledged: Counter[str] = Counter()
        """Messages of each producer that were acknowledged."""
        self.kept: dict[bytes, None] = {}
        """Messages without a producer that were acknowledged."""
        self.unknown: set[bytes] = set()
        self.rejected: set[bytes] = set()
        self.tail = ""
        """The highest offset in any answer so far."""
        self.seen: list[ReaderLog] = []

    def observe_tail(self, offset: str, at_least: str) -> None:
        """Record the tail in an answer; `at_least` is the highest one known when the request was sent."""
        if offset < at_least:
            raise Violation(f"{self.path}: the tail went back from {at_least} to {offset}")
        self.tail = max(self.tail, offset)

    def guaranteed(self) -> Guaranteed:
        """Return what every later read must contain."""
        return Guaranteed(Counter(self.acknowledged), tuple(self.kept))

    def check(self, content: bytes, guaranteed: Guaranteed) -> None:
        """Check content that was read after `guaranteed` was taken, possibly while other clients were writing."""
        found = [part + b";" for part in content.split(b";")]
        if found.pop() != b";":
            raise Violation(f"{self.path} ends within a message")
        counts = Counter(found)
        numbers: dict[str, list[int]] = {}
        for each in found:
            who, number, _ = each.decode().split(":", 2)
            if each != message(who, int(number)):
                raise Violation(f"{self.path}: message {number} of {who} is incomplete")
            numbers.setdefault(who, []).append(int(number))
        for who, tried in self.tried.items():
            there = numbers.pop(who, [])
            if there != list(range(len(there))):
                raise Violation(f"{self.path}: the messages of {who} are not present once each and in order")
            if not guaranteed.acknowledged[who] <= len(there) <= tried:
                acknowledged = guaranteed.acknowledged[who]
                raise Violation(f"{self.path}: {len(there)} messages of {who}, {acknowledged} acknowledged")
        for who, there in numbers.items():
            if there != sorted(there):
                raise Violation(f"{self.path}: the messages of {who} are out of order")
        lost = [each for each in guaranteed.kept if counts[each] != 1]
        if lost:
            raise Violation(f"{self.path}: {lost[0][:40]!r} was acknowledged and is present {counts[lost[0]]} times")
        twice = [each for each in self.unknown if counts[each] > 1]
        if twice:
            raise Violation(f"{self.path}: {twice[0][:40]!r} is present more than once")
        ghosts = self.rejected & counts.keys()
        if ghosts:
            raise Violation(f"{self.path}: {ghosts.pop()[:40]!r} was rejected and is present")
        for seen in self.seen:
            if not (content.startswith(seen.content) or seen.content.startswith(content)):
                raise Violation(f"{self.path}: a reader ({seen.kind}) saw content that is no longer there")


class Guaranteed(NamedTuple):
    acknowledged: Counter[str]
    kept: tuple[bytes, ...]


class ReaderLog:
    """The content that one reader has read so far, and the offset where it continues."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.content = bytearray()
        self.offset = "-1"

    def add(self, data: bytes, offset: str) -> None:
        self.content += data
        self.offset = offset
        if int(offset.split("_")[1], 16) != len(self.content):
            raise Violation(f"a reader ({self.kind}) has {len(self.content)} bytes, but its offset is {offset}")


class Workload:
    """The clients' shared state: random numbers, counters and the history of every stream."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.port = port
        self.rng = rng
        self.running = True
        self.histories: dict[str, StreamHistory] = {}
        self.counts: Counter[str] = Counter()
        self.busy: set[int] = set()
        """Statuses after which a request is repeated: those of a worker that is being restarted."""
        self.several_servers = False
        """Whether a repeated request can reach another process while the first one is delayed in a paused one."""
        self._in_doubt: set[tuple[str, str]] = set()
        self._clients: list[Client] = []

    def client(self) -> Client:
        client = Client(self.port)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        await asyncio.sleep(0.01)

    def history(self, path: str) -> StreamHistory:
        return self.histories.setdefault(path, StreamHistory(path))

    async def request_until_answered(
        self, client: Client, method: str, path: str, headers: Mapping[str, str], body: bytes, wanted: set[int]
    ) -> tuple[Reply, bool]:
        """Repeat the request until it is answered with a status in `wanted`; also return whether an answer was lost."""
        response_lost = False
        while True:
            try:
                reply = await client.request(method, path, headers, body)
            except NotSent:
                await asyncio.sleep(RETRY_S)
                continue
            except Lost:
                response_lost = True
                self.counts["lost"] += 1
                self._in_doubt.add((method, path))
                continue
            if reply.status in self.busy:
                self._in_doubt.add((method, path))
                await asyncio.sleep(RETRY_S)
                continue
            if reply.status not in wanted:
                raise Violation(f"{method} {path} {dict(headers)}: {reply.status} {reply.body!r}, wanted {wanted}")
            self.counts["answered"] += 1
            return reply, response_lost

    def can_follow(self, root: str, *methods: str) -> bool:
        """Whether a write below this path may still be performed, although a repetition of it was answered."""
        return self.several_servers and any(
            method in (methods or WRITES) and (path == root or path.startswith(root + "/"))
            for method, path in self._in_doubt
        )

    async def ask(self, client: Client, method: str, path: str, wanted: set[int]) -> Reply:
        reply, _ = await self.request_until_answered(client, method, path, {}, b"", wanted)
        return reply

    async def content(self, client: Client, path: str) -> bytes:
        """Read a whole stream, chunk by chunk."""
        content, offset = bytearray(), "-1"
        while True:
            reply = await self.ask(client, "GET", f"{path}?offset={offset}", {200})
            content += reply.body
            offset = reply.offset
            if int(offset.split("_")[1], 16) != len(content):
                raise Violation(f"{path}: {len(content)} bytes were read up to {offset}")
            if reply.headers.get("stream-up-to-date") == "true":
                return bytes(content)


def producer(who: str, seq: int) -> dict[str, str]:
    return {**TEXT, "Producer-Id": who, "Producer-Epoch": "0", "Producer-Seq": str(seq)}
