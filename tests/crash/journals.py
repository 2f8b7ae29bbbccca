"""Clients of streams that stay: producers that retry, writers that do not, and readers of every kind."""

from __future__ import annotations

import asyncio
import json

from tests.crash.wire import Lost, NotSent, Refused
from tests.crash.world import RETRY_S, TEXT, Seen, Violation, World, message, producer


async def produce(world: World, path: str, who: str) -> None:
    """Exactly-once: the same number until it is answered."""
    journal = world.journal(path)
    client = world.client()
    while world.running:
        number = journal.tried[who]
        journal.tried[who] += 1
        before = journal.tail
        reply, got_lost = await world.insist(
            client, "POST", path, producer(who, number), message(who, number), {200, 204}
        )
        if reply.status == 204 and not got_lost:
            raise Violation(f"{path}: message {number} of {who} is called a repeat, and was never sent before")
        journal.told(reply.offset, before)
        journal.acknowledged[who] += 1
        world.counts["produced"] += 1


async def write(world: World, path: str, who: str) -> None:
    """At most once: what got lost is not sent again. Now and then something that must be refused."""
    journal = world.journal(path)
    client = world.client()
    number = 0
    while world.running:
        each = message(who, number)
        number += 1
        wrong = world.dice.random() < 0.1
        before = journal.tail
        try:
            reply = await client.request("POST", path, {"Content-Type": "image/png"} if wrong else TEXT, each)
        except NotSent:
            await asyncio.sleep(RETRY_S)
            journal.rejected.add(each)
            continue
        except Lost:
            (journal.rejected if wrong else journal.unknown).add(each)
            continue
        if reply.status != (409 if wrong else 204):
            raise Violation(f"POST {path}: {reply.status} {reply.body!r}")
        if wrong:
            journal.rejected.add(each)
        else:
            journal.told(reply.offset, before)
            journal.kept[each] = None
            world.counts["written"] += 1


async def watch(world: World, path: str) -> None:
    """The tail, again and again: it never goes back, and never lies before what somebody was told already."""
    journal = world.journal(path)
    client = world.client()
    while world.running:
        before = journal.tail
        reply = await world.ask(client, "HEAD", path, {200})
        journal.told(reply.offset, before)
        await asyncio.sleep(0.005)


async def catch_up(world: World, path: str) -> None:
    journal = world.journal(path)
    seen = Seen("catch-up")
    journal.seen.append(seen)
    client = world.client()
    while world.running:
        before = journal.tail
        reply = await world.ask(client, "GET", f"{path}?offset={seen.offset}", {200})
        seen.add(reply.body, reply.offset)
        if reply.headers.get("stream-up-to-date") == "true":
            journal.told(reply.offset, before)
            await asyncio.sleep(0.003)


async def poll(world: World, path: str) -> None:
    seen = Seen("long-poll")
    world.journal(path).seen.append(seen)
    client = world.client()
    while world.running:
        reply = await world.ask(client, "GET", f"{path}?offset={seen.offset}&live=long-poll", {200, 204})
        if reply.status == 200:
            seen.add(reply.body, reply.offset)


async def listen(world: World, path: str) -> None:
    seen = Seen("sse")
    world.journal(path).seen.append(seen)
    client = world.client()
    while world.running:
        try:
            data = b""
            async for event in client.events(f"{path}?offset={seen.offset}&live=sse"):
                if event.kind == "data":
                    data += event.data.encode()
                else:
                    # What came is taken together with where to go on, or not at all.
                    seen.add(data, json.loads(event.data)["streamNextOffset"])
                    data = b""
        except NotSent:
            await asyncio.sleep(RETRY_S)
        except Lost:
            pass
        except Refused as refused:
            raise Violation(f"a reader cannot go on where it was: {refused}") from None


async def judge(world: World) -> None:
    client = world.client()
    for path, journal in world.journals.items():
        promised = journal.promised()
        journal.judge(await world.content(client, path), promised)
