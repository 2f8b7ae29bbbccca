"""What the clients of a crash test share: the server's address, what they know for certain, and how to insist.

The oracle has three outcomes. Acknowledged: there, whole, in order, once. Unknown (the answer was lost): whole or not
at all. Rejected: not there. `Journal` keeps what was tried and answered on one stream, and judges what is found.
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


class Violation(AssertionError):
    """The server broke its promise."""


def message(who: str, number: int) -> bytes:
    """What a writer's n-th message is. Some are large, so that segments roll and checkpoints are made."""
    size = 12_000 if number % 97 == 96 else number * 31 % 120
    return f"{who}:{number}:".encode() + b"x" * size + b";"


class Journal:
    """A stream that many write to and many read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tried: Counter[str] = Counter()
        """By producer, how many messages it has begun to send."""
        self.acknowledged: Counter[str] = Counter()
        """By producer, how many of them were answered."""
        self.kept: dict[bytes, None] = {}
        """Plain messages that were answered with success."""
        self.unknown: set[bytes] = set()
        self.rejected: set[bytes] = set()
        self.tail = ""
        """The furthest offset that any answer has told."""
        self.seen: list[Seen] = []

    def told(self, offset: str, at_least: str) -> None:
        """An answer told this tail, to a request that began when `at_least` had been told to somebody."""
        if offset < at_least:
            raise Violation(f"{self.path}: the tail went back from {at_least} to {offset}")
        self.tail = max(self.tail, offset)

    def promised(self) -> Promised:
        """What must be found by whoever reads from now on."""
        return Promised(Counter(self.acknowledged), tuple(self.kept))

    def judge(self, content: bytes, promised: Promised) -> None:
        """`content` was read after `promised` was taken, and perhaps while others went on."""
        found = [part + b";" for part in content.split(b";")]
        if found.pop() != b";":
            raise Violation(f"{self.path} ends within a message")
        counts = Counter(found)
        numbers: dict[str, list[int]] = {}
        for each in found:
            who, number, _ = each.decode().split(":", 2)
            if each != message(who, int(number)):
                raise Violation(f"{self.path}: message {number} of {who} is not whole")
            numbers.setdefault(who, []).append(int(number))
        for who, tried in self.tried.items():
            there = numbers.pop(who, [])
            if there != list(range(len(there))):
                raise Violation(f"{self.path}: the messages of {who} are not there once each and in order")
            if not promised.acknowledged[who] <= len(there) <= tried:
                acknowledged = promised.acknowledged[who]
                raise Violation(f"{self.path}: {len(there)} messages of {who}, {acknowledged} acknowledged")
        for who, there in numbers.items():
            if there != sorted(there):
                raise Violation(f"{self.path}: the messages of {who} are out of order")
        lost = [each for each in promised.kept if counts[each] != 1]
        if lost:
            raise Violation(f"{self.path}: {lost[0][:40]!r} was acknowledged and is there {counts[lost[0]]} times")
        twice = [each for each in self.unknown if counts[each] > 1]
        if twice:
            raise Violation(f"{self.path}: {twice[0][:40]!r} is there more than once")
        ghosts = self.rejected & counts.keys()
        if ghosts:
            raise Violation(f"{self.path}: {ghosts.pop()[:40]!r} was rejected and is there")
        for seen in self.seen:
            if not (content.startswith(seen.content) or seen.content.startswith(content)):
                raise Violation(f"{self.path}: a reader ({seen.kind}) saw what is not there any more")


class Promised(NamedTuple):
    acknowledged: Counter[str]
    kept: tuple[bytes, ...]


class Seen:
    """What one reader has read so far, and where it goes on."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.content = bytearray()
        self.offset = "-1"

    def add(self, data: bytes, offset: str) -> None:
        self.content += data
        self.offset = offset
        if int(offset.split("_")[1], 16) != len(self.content):
            raise Violation(f"a reader ({self.kind}) has {len(self.content)} bytes and is told to be at {offset}")


class World:
    def __init__(self, port: int, dice: random.Random) -> None:
        self.port = port
        self.dice = dice
        self.running = True
        self.journals: dict[str, Journal] = {}
        self.counts: Counter[str] = Counter()
        self._clients: list[Client] = []

    def client(self) -> Client:
        client = Client(self.port)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        await asyncio.sleep(0.01)

    def journal(self, path: str) -> Journal:
        return self.journals.setdefault(path, Journal(path))

    async def insist(
        self, client: Client, method: str, path: str, headers: Mapping[str, str], body: bytes, wanted: set[int]
    ) -> tuple[Reply, bool]:
        """Ask until there is an answer, which must be one of those wanted; and whether one got lost on the way."""
        got_lost = False
        while True:
            try:
                reply = await client.request(method, path, headers, body)
            except NotSent:
                await asyncio.sleep(RETRY_S)
                continue
            except Lost:
                got_lost = True
                self.counts["lost"] += 1
                continue
            if reply.status not in wanted:
                raise Violation(f"{method} {path} {dict(headers)}: {reply.status} {reply.body!r}, wanted {wanted}")
            self.counts["answered"] += 1
            return reply, got_lost

    async def ask(self, client: Client, method: str, path: str, wanted: set[int]) -> Reply:
        reply, _ = await self.insist(client, method, path, {}, b"", wanted)
        return reply

    async def content(self, client: Client, path: str) -> bytes:
        """All of a stream, chunk by chunk."""
        content, offset = bytearray(), "-1"
        while True:
            reply = await self.ask(client, "GET", f"{path}?offset={offset}", {200})
            content += reply.body
            offset = reply.offset
            if int(offset.split("_")[1], 16) != len(content):
                raise Violation(f"{path}: {len(content)} bytes lead to {offset}")
            if reply.headers.get("stream-up-to-date") == "true":
                return bytes(content)


def producer(who: str, seq: int) -> dict[str, str]:
    return {**TEXT, "Producer-Id": who, "Producer-Epoch": "0", "Producer-Seq": str(seq)}
