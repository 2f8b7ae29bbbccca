"""Clients of short-lived streams: created, closed, deleted, forked, expired, and created again under the same name.

Each client is the only user of its streams and repeats a request until there is a response, so it knows the content.
With several servers, the first of two such requests can be performed long after the second: a name that this can
happen to is not used again.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from tests.crash.wire import Client
from tests.crash.workload import TEXT, Violation, Workload, message, producer

TTL_S = 1
TIMEOUT_S = 90.0
GONE_AFTER_S = 1.5
"""The TTL of one second, a sixteenth of it for accesses that a crash lost, and time for the sweep."""


async def recreate_repeatedly(workload: Workload, path: str) -> None:
    """Repeatedly create and delete a stream with one name; content of an earlier one must never reappear."""
    client = workload.client()
    number = 0
    name = path
    while workload.running:
        await run_lifecycle(workload, client, name, f"life{number}")
        number += 1
        if workload.can_follow(name):
            name = f"{path}-{number}"
        workload.counts["lifecycles"] += 1


async def run_lifecycle(workload: Workload, client: Client, path: str, who: str) -> None:
    content = message(who, 0)
    await workload.request_until_answered(client, "PUT", path, TEXT, content, {200, 201})
    for number in range(workload.rng.randrange(1, 6)):
        each = message(who, number + 1)
        await workload.request_until_answered(client, "POST", path, producer(who, number), each, {200, 204})
        content += each
        await expect(workload, client, path, content)
    closes = workload.rng.random() < 0.5
    if closes:
        number += 1
        each = message(who, number + 1)
        headers = {**producer(who, number), "Stream-Closed": "true"}
        await workload.request_until_answered(client, "POST", path, headers, each, {200, 204})
        content += each
        await workload.request_until_answered(client, "POST", path, TEXT, b"too late;", {409})
        await asyncio.sleep(workload.rng.uniform(0, 0.1))
        await workload.request_until_answered(client, "POST", path, producer(who, number + 1), b"too late;", {409})
    await expect(workload, client, path, content, closed=closes)
    await workload.ask(client, "DELETE", path, {204, 404})
    if workload.can_follow(path, "PUT"):
        return
    for pause_s in (0.0, workload.rng.uniform(0, 0.1)):
        await asyncio.sleep(pause_s)
        await workload.ask(client, "GET", path, {404})
    await workload.request_until_answered(client, "POST", path, TEXT, b"too late;", {404})


async def expect(workload: Workload, client: Client, path: str, content: bytes, *, closed: bool = False) -> None:
    found = await workload.content(client, path)
    if found != content:
        raise Violation(f"{path}: found {found[:200]!r} instead of {content[:200]!r}")
    head = await workload.ask(client, "HEAD", path, {200})
    if (head.headers.get("stream-closed") == "true") != closed:
        raise Violation(f"{path} should be {'closed' if closed else 'open'}")


# -- forks -------------------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A stream in a tree of forks."""

    path: str
    content: bytes
    offsets: list[tuple[str, int]]
    """Offsets that the server returned, with the number of bytes before each."""
    children: list[Node] = field(default_factory=list)
    deleted: bool = False
    expires_at: float | None = None
    seq: int = 0

    @property
    def must_exist(self) -> bool | None:
        """Whether its data must still exist; None while a fork may or may not have expired."""
        if not self.deleted and self.expires_at is None:
            return True
        needed = [child.must_exist for child in self.children]
        if True in needed:
            return True
        if self.expires_at is not None and not self.deleted:
            return None
        return None if None in needed else False


async def fork_repeatedly(workload: Workload, path: str) -> None:
    """Create trees of forks under the same names, and delete or expire their streams in random order."""
    client = workload.client()
    number = 0
    name = path
    while workload.running:
        await run_fork_tree(workload, client, name, f"f{number}")
        number += 1
        if workload.can_follow(name):
            name = f"{path}-{number}"
        workload.counts["fork trees"] += 1


async def run_fork_tree(workload: Workload, client: Client, path: str, who: str) -> None:
    rng = workload.rng
    root = Node(f"{path}/root", b"", [])
    await workload.request_until_answered(client, "PUT", root.path, TEXT, b"", {200, 201})
    tree = [root]
    for _ in range(rng.randrange(1, 4)):
        await append(workload, client, root, who)
    for number in range(rng.randrange(1, 4)):
        source = rng.choice([node for node in tree if node.expires_at is None])
        tree.append(await fork(workload, client, source, f"{path}/{number}", expires=rng.random() < 0.25))
        for node in tree:
            if node.expires_at is None and rng.random() < 0.5:
                await append(workload, client, node, who)
    await check_tree(workload, client, tree)
    if workload.can_follow(path, "PUT"):
        return
    deletable = [node for node in tree if node.expires_at is None]
    rng.shuffle(deletable)
    for node in deletable:
        await workload.ask(client, "DELETE", node.path, {204, 404, 410})
        node.deleted = True
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, 0.1))
        await check_tree(workload, client, tree)
    for node in tree:
        if node.expires_at is not None:
            await asyncio.sleep(max(0.0, node.expires_at - time.monotonic()))
            node.deleted = True
            await wait_until_removed(workload, client, node, tree)
    await check_tree(workload, client, tree)


async def wait_until_removed(workload: Workload, client: Client, node: Node, tree: list[Node]) -> None:
    """Check that an expired fork is 404 at once, and wait until the sources that only it needed are 404 as well."""
    until = time.monotonic() + TIMEOUT_S
    needed = [other for other in tree if other.deleted and other.must_exist is False]
    while True:
        await workload.ask(client, "GET", node.path, {404})
        left = [other for other in needed if (await workload.ask(client, "GET", other.path, {404, 410})).status == 410]
        if not left:
            return
        if time.monotonic() > until:
            raise Violation(f"{left[0].path} still exists, though the fork that needed it has expired")
        await asyncio.sleep(0.02)


async def fork(workload: Workload, client: Client, source: Node, path: str, *, expires: bool) -> Node:
    headers = {"Stream-Forked-From": source.path}
    size = len(source.content)
    if source.offsets and workload.rng.random() < 0.5:
        offset, size = workload.rng.choice(source.offsets)
        headers["Stream-Fork-Offset"] = offset
    if expires:
        headers["Stream-TTL"] = str(TTL_S)
    await workload.request_until_answered(client, "PUT", path, headers, b"", {200, 201})
    offsets = [offset for offset in source.offsets if offset[1] <= size]
    node = Node(path, source.content[:size], offsets)
    if expires:
        # Nothing accesses it from now on, so it must have expired by then.
        node.expires_at = time.monotonic() + GONE_AFTER_S
    source.children.append(node)
    return node


async def append(workload: Workload, client: Client, node: Node, who: str) -> None:
    each = message(f"{who}-{node.path.rsplit('/', 1)[1]}", node.seq)
    headers = producer(f"{who}-{node.path}", node.seq)
    reply, _ = await workload.request_until_answered(client, "POST", node.path, headers, each, {200, 204})
    node.seq += 1
    node.content += each
    node.offsets.append((reply.offset, len(node.content)))


async def check_tree(workload: Workload, client: Client, tree: list[Node]) -> None:
    """Check that every stream has the right content, or is deleted but still needed (410), or is gone (404)."""
    for node in tree:
        there = node.must_exist
        if not node.deleted and node.expires_at is None:
            await expect(workload, client, node.path, node.content)
        elif node.deleted and there is not None:
            await workload.ask(client, "GET", node.path, {410 if there else 404})
