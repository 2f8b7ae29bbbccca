"""Clients of streams that come and go: created, closed, deleted, forked, expired, and created anew under the same name.

Each has its streams to itself and asks until it is answered, so it always knows exactly what must be there.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from tests.crash.wire import Client
from tests.crash.world import TEXT, Violation, World, message, producer

TTL_S = 1
PATIENCE_S = 20.0
GONE_AFTER_S = 1.5
"""A second of TTL, a sixteenth of that for uses a crash forgot, and time to be looked at."""


async def live_and_die(world: World, path: str) -> None:
    """One name, many lives: nothing of an earlier one may ever show again."""
    client = world.client()
    life = 0
    while world.running:
        await one_life(world, client, path, f"life{life}")
        life += 1
        world.counts["lives"] += 1


async def one_life(world: World, client: Client, path: str, who: str) -> None:
    content = message(who, 0)
    await world.insist(client, "PUT", path, TEXT, content, {200, 201})
    for number in range(world.dice.randrange(1, 6)):
        each = message(who, number + 1)
        await world.insist(client, "POST", path, producer(who, number), each, {200, 204})
        content += each
        await expect(world, client, path, content)
    closes = world.dice.random() < 0.5
    if closes:
        number += 1
        each = message(who, number + 1)
        headers = {**producer(who, number), "Stream-Closed": "true"}
        await world.insist(client, "POST", path, headers, each, {200, 204})
        content += each
        await world.insist(client, "POST", path, TEXT, b"too late;", {409})
        await asyncio.sleep(world.dice.uniform(0, 0.1))
        await world.insist(client, "POST", path, producer(who, number + 1), b"too late;", {409})
    await expect(world, client, path, content, closed=closes)
    await world.ask(client, "DELETE", path, {204, 404})
    for pause_s in (0.0, world.dice.uniform(0, 0.1)):
        await asyncio.sleep(pause_s)
        await world.ask(client, "GET", path, {404})
    await world.insist(client, "POST", path, TEXT, b"too late;", {404})


async def expect(world: World, client: Client, path: str, content: bytes, *, closed: bool = False) -> None:
    found = await world.content(client, path)
    if found != content:
        raise Violation(f"{path}: {found[:200]!r} is there instead of {content[:200]!r}")
    head = await world.ask(client, "HEAD", path, {200})
    if (head.headers.get("stream-closed") == "true") != closed:
        raise Violation(f"{path} should be {'closed' if closed else 'open'}")


# -- forks -------------------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A stream of a family of forks."""

    path: str
    content: bytes
    places: list[tuple[str, int]]
    """Offsets that were told, with how many bytes lie before each."""
    children: list[Node] = field(default_factory=list)
    deleted: bool = False
    expires_at: float | None = None
    seq: int = 0

    @property
    def is_there(self) -> bool | None:
        """Whether anything of it must be kept; None while a fork may or may not have expired."""
        if not self.deleted and self.expires_at is None:
            return True
        needed = [child.is_there for child in self.children]
        if True in needed:
            return True
        if self.expires_at is not None and not self.deleted:
            return None
        return None if None in needed else False


async def branch(world: World, path: str) -> None:
    """Family after family of forks under the same names, deleted and expired in any order."""
    client = world.client()
    number = 0
    while world.running:
        await one_family(world, client, path, f"f{number}")
        number += 1
        world.counts["families"] += 1


async def one_family(world: World, client: Client, path: str, who: str) -> None:
    dice = world.dice
    root = Node(f"{path}/root", b"", [])
    await world.insist(client, "PUT", root.path, TEXT, b"", {200, 201})
    family = [root]
    for _ in range(dice.randrange(1, 4)):
        await grow(world, client, root, who)
    for number in range(dice.randrange(1, 4)):
        source = dice.choice([node for node in family if node.expires_at is None])
        family.append(await fork(world, client, source, f"{path}/{number}", expires=dice.random() < 0.25))
        for node in family:
            if node.expires_at is None and dice.random() < 0.5:
                await grow(world, client, node, who)
    await look(world, client, family)
    dying = [node for node in family if node.expires_at is None]
    dice.shuffle(dying)
    for node in dying:
        await world.ask(client, "DELETE", node.path, {204, 404, 410})
        node.deleted = True
        if dice.random() < 0.3:
            await asyncio.sleep(dice.uniform(0, 0.1))
        await look(world, client, family)
    for node in family:
        if node.expires_at is not None:
            await asyncio.sleep(max(0.0, node.expires_at - time.monotonic()))
            node.deleted = True
            await see_it_go(world, client, node, family)
    await look(world, client, family)


async def see_it_go(world: World, client: Client, node: Node, family: list[Node]) -> None:
    """An expired fork is gone at once; what only it needed goes when that is noticed, and stays deleted till then."""
    until = time.monotonic() + PATIENCE_S
    needed = [other for other in family if other.deleted and other.is_there is False]
    while True:
        await world.ask(client, "GET", node.path, {404})
        left = [other for other in needed if (await world.ask(client, "GET", other.path, {404, 410})).status == 410]
        if not left:
            return
        if time.monotonic() > until:
            raise Violation(f"{left[0].path} is still there, though the fork that needed it expired")
        await asyncio.sleep(0.02)


async def fork(world: World, client: Client, source: Node, path: str, *, expires: bool) -> Node:
    headers = {"Stream-Forked-From": source.path}
    size = len(source.content)
    if source.places and world.dice.random() < 0.5:
        offset, size = world.dice.choice(source.places)
        headers["Stream-Fork-Offset"] = offset
    if expires:
        headers["Stream-TTL"] = str(TTL_S)
    await world.insist(client, "PUT", path, headers, b"", {200, 201})
    places = [place for place in source.places if place[1] <= size]
    node = Node(path, source.content[:size], places)
    if expires:
        # From here on nobody touches it, so it is gone by then whatever happens.
        node.expires_at = time.monotonic() + GONE_AFTER_S
    source.children.append(node)
    return node


async def grow(world: World, client: Client, node: Node, who: str) -> None:
    each = message(f"{who}-{node.path.rsplit('/', 1)[1]}", node.seq)
    headers = producer(f"{who}-{node.path}", node.seq)
    reply, _ = await world.insist(client, "POST", node.path, headers, each, {200, 204})
    node.seq += 1
    node.content += each
    node.places.append((reply.offset, len(node.content)))


async def look(world: World, client: Client, family: list[Node]) -> None:
    """Every stream is there with the right content, or deleted but needed (410), or gone (404)."""
    for node in family:
        there = node.is_there
        if not node.deleted and node.expires_at is None:
            await expect(world, client, node.path, node.content)
        elif node.deleted and there is not None:
            await world.ask(client, "GET", node.path, {410 if there else 404})
