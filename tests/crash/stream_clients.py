"""Clients of streams that are never deleted: producers that retry, writers that do not, and readers of every kind."""

from __future__ import annotations

import asyncio
import json

from tests.crash.wire import Lost, NotSent, Refused
from tests.crash.workload import RETRY_S, TEXT, ReaderLog, Violation, Workload, message, producer


async def produce(workload: Workload, path: str, who: str) -> None:
    """Append exactly once: repeat the same sequence number until there is a response."""
    history = workload.history(path)
    client = workload.client()
    while workload.running:
        number = history.tried[who]
        history.tried[who] += 1
        before = history.tail
        reply, response_lost = await workload.request_until_answered(
            client, "POST", path, producer(who, number), message(who, number), {200, 204}
        )
        if reply.status == 204 and not response_lost:
            raise Violation(f"{path}: message {number} of {who} was reported as a duplicate, but was never sent before")
        history.observe_tail(reply.offset, before)
        history.acknowledged[who] += 1
        workload.counts["produced"] += 1


async def write(workload: Workload, path: str, who: str) -> None:
    """Append at most once: never repeat a request. One in ten has a wrong content type and must be refused."""
    history = workload.history(path)
    client = workload.client()
    number = 0
    while workload.running:
        each = message(who, number)
        number += 1
        wrong = workload.rng.random() < 0.1
        before = history.tail
        try:
            reply = await client.request("POST", path, {"Content-Type": "image/png"} if wrong else TEXT, each)
        except NotSent:
            await asyncio.sleep(RETRY_S)
            history.rejected.add(each)
            continue
        except Lost:
            (history.rejected if wrong else history.unknown).add(each)
            continue
        if reply.status != (409 if wrong else 204):
            raise Violation(f"POST {path}: {reply.status} {reply.body!r}")
        if wrong:
            history.rejected.add(each)
        else:
            history.observe_tail(reply.offset, before)
            history.kept[each] = None
            workload.counts["written"] += 1


async def watch(workload: Workload, path: str) -> None:
    """Read the tail repeatedly: it must never move back or be lower than an answer that any client has received."""
    history = workload.history(path)
    client = workload.client()
    while workload.running:
        before = history.tail
        reply = await workload.ask(client, "HEAD", path, {200})
        history.observe_tail(reply.offset, before)
        await asyncio.sleep(0.005)


async def catch_up(workload: Workload, path: str) -> None:
    history = workload.history(path)
    seen = ReaderLog("catch-up")
    history.seen.append(seen)
    client = workload.client()
    while workload.running:
        before = history.tail
        reply = await workload.ask(client, "GET", f"{path}?offset={seen.offset}", {200})
        seen.add(reply.body, reply.offset)
        if reply.headers.get("stream-up-to-date") == "true":
            history.observe_tail(reply.offset, before)
            await asyncio.sleep(0.003)


async def poll(workload: Workload, path: str) -> None:
    seen = ReaderLog("long-poll")
    workload.history(path).seen.append(seen)
    client = workload.client()
    while workload.running:
        reply = await workload.ask(client, "GET", f"{path}?offset={seen.offset}&live=long-poll", {200, 204})
        if reply.status == 200:
            seen.add(reply.body, reply.offset)


async def listen(workload: Workload, path: str) -> None:
    seen = ReaderLog("sse")
    workload.history(path).seen.append(seen)
    client = workload.client()
    while workload.running:
        try:
            data = b""
            async for event in client.events(f"{path}?offset={seen.offset}&live=sse"):
                if event.kind == "data":
                    data += event.data.encode()
                else:
                    # Keep the data only together with the offset that follows it.
                    seen.add(data, json.loads(event.data)["streamNextOffset"])
                    data = b""
        except NotSent:
            await asyncio.sleep(RETRY_S)
        except Lost:
            pass
        except Refused as refused:
            raise Violation(f"a reader cannot resume at its offset: {refused}") from None


async def check_contents(workload: Workload) -> None:
    client = workload.client()
    for path, history in workload.histories.items():
        guaranteed = history.guaranteed()
        history.check(await workload.content(client, path), guaranteed)
