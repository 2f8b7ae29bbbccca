"""Clients whose history is checked: writers, producers and readers of kept streams, and clients that create and delete.

They have a list of base URLs and use a random one for each request, so that the same clients work with one server,
several workers, or a cluster. Responses are logged, and `history` checks them later. Only a response that can never be
correct, such as a 500, ends the run immediately.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

from tests.crash.wire import Client, Event, Lost, NotSent, Refused, Reply
from tests.crash.workload import Violation, Workload
from tests.pressure.history import History, Kind, Operation, Outcome, Producer

RETRY_S = 0.005
TEXT = {"Content-Type": "text/plain"}
BUSY = {429, 503, 507}
"""Errors of a failing server. The rejected request may have reached the disk, so its outcome is unknown."""
PAUSE_S = 0.002
GIVE_UP_S = 120.0


class Fleet:
    """The servers, the history of requests to them, and whether to continue."""

    def __init__(self, urls: Sequence[str], dice: random.Random, root: str = "") -> None:
        self.urls = list(urls)
        self._root = root
        """Where the streams are: runs on one server need different ones."""
        self.dice = dice
        self.history = History()
        self.running = True
        self.counts: Counter[str] = Counter()
        self._links: list[Client] = []
        self._names = itertools.count()
        self.kept: list[str] = []

    def link(self) -> Link:
        return Link(self)

    def connect(self, url: str) -> Client:
        parts = urlsplit(url)
        assert parts.hostname is not None
        client = Client(parts.port or 80, parts.hostname)
        self._links.append(client)
        return client

    def cut(self) -> None:
        """Break every connection."""
        for client in self._links:
            client.close()

    async def close(self) -> None:
        self.cut()
        await asyncio.sleep(0.01)

    def ended(self) -> bool:
        return not self.running

    def fresh(self, stem: str) -> str:
        return f"/v1/stream/{self._root}{stem}/{next(self._names)}"


class Link(Client):
    """The connections of one client to all servers: each request goes to a random one."""

    def __init__(self, fleet: Fleet) -> None:
        self._clients = [fleet.connect(url) for url in fleet.urls]
        self._dice = fleet.dice

    async def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Reply:
        try:
            return await self._dice.choice(self._clients).request(method, path, headers, body)
        except TimeoutError as error:
            raise Lost(f"{method} {path} had no response in time") from error

    def events(self, path: str) -> AsyncGenerator[Event, None]:
        return self._dice.choice(self._clients).events(path)

    def close(self) -> None:
        for client in self._clients:
            client.close()


class FleetWorkload(Workload):
    """The shared state of clients that know what their streams contain, and send their requests to a whole fleet."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(0, fleet.dice)
        self._fleet = fleet
        self.busy = BUSY
        self.several_servers = len(fleet.urls) > 1

    def client(self) -> Client:
        return self._fleet.link()


def byte_position(token: str) -> int:
    return int(token.split("_")[1], 16)


async def logged(fleet: Fleet, link: Link, operation: Operation, method: str, target: str, **more: Any) -> Reply | None:
    """Send a request once and log the response; None if the outcome is unknown or the request was not sent."""
    try:
        reply = await link.request(method, target, **more)
    except NotSent:
        fleet.history.end(operation, "refused")
        await asyncio.sleep(RETRY_S)
        return None
    except Lost:
        fleet.counts["lost"] += 1
        return None
    if reply.status in BUSY:
        fleet.counts["busy"] += 1
        if operation.kind in {"read", "tail"}:
            fleet.history.end(operation, "refused")
        await asyncio.sleep(RETRY_S)
        return None
    if reply.status >= 500:
        raise Violation(f"{method} {target}: {reply.status} {reply.body!r}")
    if reply.status == 404:
        fleet.history.end(operation, "missing")
        return reply
    operation.end = byte_position(reply.headers.get("stream-next-offset", "0_0"))
    operation.up_to_date = reply.headers.get("stream-up-to-date") == "true"
    fleet.history.end(operation, _outcome(operation, reply))
    fleet.counts["answered"] += 1
    return reply


def _outcome(operation: Operation, reply: Reply) -> Outcome:
    if operation.kind == "create":
        return "ok" if reply.status == 201 else "refused"
    return "ok" if reply.status in {200, 204} else "refused"


# -- kept streams


async def write(fleet: Fleet, path: str, who: str) -> None:
    """Append without retries; occasionally send an append that must be rejected."""
    link = fleet.link()
    for number in itertools.count():
        if not fleet.running:
            return
        wrong = fleet.dice.random() < 0.05
        body = message(who, number)
        operation = fleet.history.begin("append", path, body)
        headers = {"Content-Type": "image/png"} if wrong else TEXT
        reply = await logged(fleet, link, operation, "POST", path, headers=headers, body=body)
        if reply is not None and (reply.status == 409) != wrong:
            raise Violation(f"POST {path} with {headers}: {reply.status} {reply.body!r}")
        await asyncio.sleep(fleet.dice.uniform(0, PAUSE_S))


async def produce(fleet: Fleet, path: str, who: str) -> None:
    """Send each message as a producer until there is a response."""
    link = fleet.link()
    for seq in itertools.count():
        body = message(who, seq)
        headers = {**TEXT, "Producer-Id": who, "Producer-Epoch": "0", "Producer-Seq": str(seq)}
        retried = False
        while True:
            if not fleet.running:
                return
            operation = fleet.history.begin("append", path, body, Producer(who, seq))
            operation.retried = retried
            reply = await logged(fleet, link, operation, "POST", path, headers=headers, body=body)
            if reply is not None:
                break
            retried = True
        if reply.status not in {200, 204}:
            raise Violation(f"{who} {seq}: {reply.status} {reply.body!r}")
        if reply.status == 204 and not retried:
            raise Violation(f"{path}: message {seq} of {who} was reported as a duplicate, but was sent only once")


async def follow(fleet: Fleet, path: str, live: str) -> None:
    """Continue reading where the last response ended, by catch-up or long-poll."""
    link = fleet.link()
    token, at = "-1", 0
    while fleet.running:
        operation = fleet.history.begin("read", path, start=at)
        reply = await logged(fleet, link, operation, "GET", f"{path}?offset={token}{live}")
        if reply is None:
            continue
        if reply.status not in {200, 204}:
            raise Violation(f"GET {path} from {token}: {reply.status} {reply.body!r}")
        operation.body = reply.body
        token, at = reply.offset, operation.end
        if fleet.dice.random() < 0.02:
            token, at = "-1", 0
        await asyncio.sleep(fleet.dice.uniform(0, PAUSE_S))


async def listen(fleet: Fleet, path: str) -> None:
    """Continue reading by server-sent events; each control event ends one read."""
    link = fleet.link()
    token, at = "-1", 0
    while fleet.running:
        data = b""
        try:
            async with aclosing(link.events(f"{path}?offset={token}&live=sse")) as events:
                async for event in events:
                    if event.kind == "data":
                        data += event.data.encode()
                        continue
                    operation = fleet.history.begin("read", path, data, start=at)
                    token = json.loads(event.data)["streamNextOffset"]
                    at = operation.end = byte_position(token)
                    fleet.history.end(operation, "ok")
                    fleet.counts["events"] += 1
                    data = b""
                    if fleet.ended():
                        break
        except (Lost, NotSent, TimeoutError):
            await asyncio.sleep(RETRY_S)
        except Refused as refused:
            if not any(f" {status} " in f"{refused} " for status in BUSY):
                raise Violation(f"a reader cannot continue from its offset: {refused}") from None
            await asyncio.sleep(RETRY_S)


async def watch(fleet: Fleet, path: str) -> None:
    link = fleet.link()
    while fleet.running:
        operation = fleet.history.begin("tail", path)
        await logged(fleet, link, operation, "HEAD", path)
        await asyncio.sleep(fleet.dice.uniform(0, 2 * PAUSE_S))


def message(who: str, number: int) -> bytes:
    return f"{who}:{number}:".encode() + b"x" * (number * 37 % 300) + b";"


# -- temporary streams

METHODS: dict[Kind, str] = {"create": "PUT", "append": "POST", "read": "GET", "delete": "DELETE"}


async def create_and_delete(fleet: Fleet, who: str, names: list[str]) -> None:
    """Create, append to, read and delete streams; several of these race on each name."""
    link = fleet.link()
    for number in itertools.count():
        if not fleet.running:
            return
        path = names[-1]
        (kind,) = fleet.dice.choices(tuple(METHODS), (3, 4, 6, 1.5))
        if kind == "read" and fleet.dice.random() < 0.4:
            path = fleet.dice.choice(names)
        await _once(fleet, link, kind, path, f"{who}.{number};".encode())
        if fleet.dice.random() < 0.05:
            names.append(fleet.fresh("mortal"))
            await _once(fleet, link, "delete", path)
        await asyncio.sleep(fleet.dice.uniform(0, PAUSE_S))


async def _once(fleet: Fleet, link: Link, kind: Kind, path: str, body: bytes = b"") -> None:
    body = body if kind in {"create", "append"} else b""
    operation = fleet.history.begin(kind, path, body)
    target = f"{path}?offset=-1" if kind == "read" else path
    reply = await logged(fleet, link, operation, METHODS[kind], target, headers=TEXT if body else {}, body=body)
    if reply is not None and kind == "read":
        operation.body = reply.body if reply.status == 200 else b""


# -- all together


async def answered(client: Client, method: str, target: str, headers: Mapping[str, str] | None = None) -> Reply:
    """Repeat a request until there is a response. A server that is healthy again may still be busy for a moment."""
    while True:
        with suppress(Lost, NotSent, TimeoutError):
            reply = await client.request(method, target, headers)
            if reply.status not in BUSY:
                return reply
        await asyncio.sleep(RETRY_S)


async def set_up(fleet: Fleet, kept: int = 2) -> None:
    link = fleet.link()
    for _ in range(kept):
        path = fleet.fresh("kept")
        reply = await answered(link, "PUT", path, TEXT)
        if reply.status not in {200, 201}:
            raise Violation(f"PUT {path}: {reply.status} {reply.body!r}")
        fleet.kept.append(path)


def everybody(fleet: Fleet) -> list[Coroutine[Any, Any, None]]:
    clients: list[Coroutine[Any, Any, None]] = []
    for number, path in enumerate(fleet.kept):
        clients += [write(fleet, path, f"w{number}"), write(fleet, path, f"v{number}")]
        clients += [produce(fleet, path, f"p{number}"), produce(fleet, path, f"q{number}")]
        clients += [follow(fleet, path, ""), follow(fleet, path, "&live=long-poll"), listen(fleet, path)]
        clients += [watch(fleet, path)]
    names = [fleet.fresh("mortal")]
    clients += [create_and_delete(fleet, f"m{number}", names) for number in range(5)]
    return clients


async def content(fleet: Fleet, path: str) -> bytes:
    """The whole content of a kept stream, which must be the same on every server."""
    found: list[bytes] = []
    for url in fleet.urls:
        client = fleet.connect(url)
        body, token = bytearray(), "-1"
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                reply = await answered(client, "GET", f"{path}?offset={token}")
                if reply.status != 200:
                    raise Violation(f"GET {path}: {reply.status} {reply.body!r}")
                body += reply.body
                token = reply.offset
                if reply.headers.get("stream-up-to-date") == "true":
                    break
        found.append(bytes(body))
    if any(other != found[0] for other in found):
        raise Violation(f"{path}: servers differ")
    return found[0]
