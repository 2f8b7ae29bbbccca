"""A pull-wake subscription and its worker, who does nothing unless woken: so a wake that got lost is work undone.

Now and then the worker takes up work and walks away. Then, and after every crash, what is not acked must wake it again.
"""

from __future__ import annotations

import asyncio
import json
import time

from tests.crash.wire import Client, Lost, NotSent, Reply
from tests.crash.world import RETRY_S, Violation, World, message, producer

SUBSCRIPTION = "/v1/stream/__ds/subscriptions/crew"
WAKES = "/v1/stream/wakes"
LEASE_MS = 1000


class Crew:
    def __init__(self, world: World, streams: int) -> None:
        self._world = world
        self._paths = [f"/v1/stream/work/{number}" for number in range(streams)]
        self._sent: dict[str, int] = dict.fromkeys(self._paths, 0)
        self._acked: dict[str, str] = {}
        self._generation = 0
        self._working = True

    async def set_up(self) -> None:
        client = self._world.client()
        json_type = {"Content-Type": "application/json"}
        await self._world.insist(client, "PUT", WAKES, json_type, b"", {200, 201})
        wanted = {"type": "pull-wake", "pattern": "work/*", "wake_stream": "wakes", "lease_ttl_ms": LEASE_MS}
        await self._world.insist(client, "PUT", SUBSCRIPTION, json_type, json.dumps(wanted).encode(), {200, 201})
        for path in self._paths:
            await self._world.insist(client, "PUT", path, {"Content-Type": "text/plain"}, b"", {200, 201})

    async def order(self) -> None:
        """Somebody who has work to be done, in bursts."""
        world, client = self._world, self._world.client()
        while world.running:
            path = world.dice.choice(self._paths)
            number = self._sent[path]
            await world.insist(client, "POST", path, producer("boss", number), message("boss", number), {200, 204})
            self._sent[path] += 1
            world.counts["ordered"] += 1
            if world.dice.random() < 0.2:
                await asyncio.sleep(world.dice.uniform(0, 0.3))

    async def work(self) -> None:
        """Wait to be woken; claim, read, ack."""
        world, client = self._world, self._world.client()
        offset = "-1"
        while self._working:
            reply = await world.ask(client, "GET", f"{WAKES}?offset={offset}&live=long-poll", {200, 204})
            if reply.status == 200:
                offset = reply.offset
                if self._working:
                    await self._take_up(client)

    async def finish(self, patience_s: float) -> None:
        """All that was ever ordered must come to be acked, with nobody asking for it but the wakes."""
        world, client = self._world, self._world.client()
        until = time.monotonic() + patience_s
        while True:
            view = (await world.ask(client, "GET", SUBSCRIPTION, {200})).json()
            acked = {link["path"]: link["acked_offset"] for link in view["streams"]}
            undone = []
            for path in self._paths:
                tail = (await world.ask(client, "HEAD", path, {200})).offset
                if acked.get(path.removeprefix("/v1/stream/")) != tail:
                    undone.append(path)
            if not undone:
                break
            if time.monotonic() > until:
                raise Violation(f"{undone}: work that nobody was woken for; the subscription is {view}")
            await asyncio.sleep(0.05)
        self._working = False

    async def _take_up(self, client: Client) -> None:
        world = self._world
        # A wake is told of once: whoever has heard of it asks until it is answered.
        while (claimed := await self._once(client, "claim", {"worker": "worker"})) is None:
            pass
        if claimed.status == 409:
            # Somebody holds it (perhaps our own claim, whose answer got lost), or there is nothing: a wake will tell.
            return
        if claimed.status != 200:
            raise Violation(f"claim: {claimed.status} {claimed.body!r}")
        claim = claimed.json()
        if claim["generation"] <= self._generation:
            raise Violation(f"generation {claim['generation']} was given out before")
        self._generation = claim["generation"]
        world.counts["claims"] += 1
        acks = []
        for link in claim["streams"]:
            before = self._acked.get(link["path"], "")
            if link["acked_offset"] < before:
                raise Violation(f"{link['path']}: the cursor went back from {before} to {link['acked_offset']}")
            if link["has_pending"]:
                await world.ask(client, "GET", f"/v1/stream/{link['path']}?offset={link['acked_offset']}", {200})
                acks.append({"stream": link["path"], "offset": link["tail_offset"]})
        if world.dice.random() < 0.1:
            return
        body = {"wake_id": claim["wake_id"], "generation": claim["generation"], "acks": acks, "done": True}
        acked = await self._once(client, "ack", body, {"Authorization": f"Bearer {claim['token']}"})
        if acked is not None and acked.status == 200:
            self._acked.update((ack["stream"], ack["offset"]) for ack in acks)
            world.counts["acks"] += 1
        elif acked is not None and acked.status not in {401, 409}:
            raise Violation(f"ack: {acked.status} {acked.body!r}")

    async def _once(
        self, client: Client, action: str, body: dict[str, object], headers: dict[str, str] | None = None
    ) -> Reply | None:
        """One try; None if the answer got lost."""
        while True:
            try:
                return await client.request(
                    "POST",
                    f"{SUBSCRIPTION}/{action}",
                    {"Content-Type": "application/json", **(headers or {})},
                    json.dumps(body).encode(),
                )
            except NotSent:
                await asyncio.sleep(RETRY_S)
            except Lost:
                return None
