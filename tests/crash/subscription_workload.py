"""A pull-wake subscription and its worker, which does nothing unless woken: a lost wake shows up as work not acked.

Sometimes the worker claims work and abandons it. After that, and after every crash, unacked work must wake it again.
"""

from __future__ import annotations

import asyncio
import json
import time

from tests.crash.wire import Client, Lost, NotSent, Reply
from tests.crash.workload import RETRY_S, Violation, Workload, message, producer

LEASE_MS = 1000


class SubscriptionWorkload:
    def __init__(self, workload: Workload, streams: int, root: str = "") -> None:
        """`root`: where the streams are, with a slash at the end; runs on one server need different ones."""
        self._workload = workload
        self._root = root
        self._subscription = f"/v1/stream/__ds/subscriptions/{root.replace('/', '-')}workers"
        self._wakes = f"/v1/stream/{root}wakes"
        self._paths = [f"/v1/stream/{root}work/{number}" for number in range(streams)]
        self._sent: dict[str, int] = dict.fromkeys(self._paths, 0)
        self._acked: dict[str, str] = {}
        self._generation = 0
        self._working = True

    async def set_up(self) -> None:
        client = self._workload.client()
        json_type = {"Content-Type": "application/json"}
        await self._workload.request_until_answered(client, "PUT", self._wakes, json_type, b"", {200, 201})
        wanted = {
            "type": "pull-wake",
            "pattern": f"{self._root}work/*",
            "wake_stream": f"{self._root}wakes",
            "lease_ttl_ms": LEASE_MS,
        }
        await self._workload.request_until_answered(
            client, "PUT", self._subscription, json_type, json.dumps(wanted).encode(), {200, 201}
        )
        for path in self._paths:
            await self._workload.request_until_answered(
                client, "PUT", path, {"Content-Type": "text/plain"}, b"", {200, 201}
            )

    async def append_work(self) -> None:
        """Append messages to the subscription's streams, in bursts."""
        workload, client = self._workload, self._workload.client()
        while workload.running:
            path = workload.rng.choice(self._paths)
            number = self._sent[path]
            await workload.request_until_answered(
                client, "POST", path, producer("source", number), message("source", number), {200, 204}
            )
            self._sent[path] += 1
            workload.counts["work appended"] += 1
            if workload.rng.random() < 0.2:
                await asyncio.sleep(workload.rng.uniform(0, 0.3))

    async def run_worker(self) -> None:
        """Wait for a wake, then claim, read and ack."""
        workload, client = self._workload, self._workload.client()
        offset = "-1"
        while self._working:
            reply = await workload.ask(client, "GET", f"{self._wakes}?offset={offset}&live=long-poll", {200, 204})
            if reply.status == 200:
                offset = reply.offset
                if self._working:
                    await self._claim_and_ack(client)

    async def wait_until_all_acked(self, timeout_s: float) -> None:
        """Wait until the worker, which only reacts to wakes, has acked every message; then stop it."""
        workload, client = self._workload, self._workload.client()
        until = time.monotonic() + timeout_s
        while True:
            view = (await workload.ask(client, "GET", self._subscription, {200})).json()
            acked = {link["path"]: link["acked_offset"] for link in view["streams"]}
            pending = []
            for path in self._paths:
                tail = (await workload.ask(client, "HEAD", path, {200})).offset
                if acked.get(path.removeprefix("/v1/stream/")) != tail:
                    pending.append(path)
            if not pending:
                break
            if time.monotonic() > until:
                raise Violation(f"{pending}: no wake led to an ack of this work; the subscription is {view}")
            await asyncio.sleep(0.05)
        self._working = False

    async def _claim_and_ack(self, client: Client) -> None:
        workload = self._workload
        # A wake is announced once, so the worker retries its claim until it gets an answer.
        while (claimed := await self._send_once(client, "claim", {"worker": "worker"})) is None:
            pass
        if claimed.status == 409:
            # The lease is held (perhaps by our claim whose answer was lost) or nothing is pending: wait for a wake.
            return
        if claimed.status != 200:
            raise Violation(f"claim: {claimed.status} {claimed.body!r}")
        claim = claimed.json()
        if claim["generation"] <= self._generation:
            raise Violation(f"generation {claim['generation']} was issued before")
        self._generation = claim["generation"]
        workload.counts["claims"] += 1
        acks = []
        for link in claim["streams"]:
            before = self._acked.get(link["path"], "")
            if link["acked_offset"] < before:
                raise Violation(f"{link['path']}: the cursor went back from {before} to {link['acked_offset']}")
            if link["has_pending"]:
                await workload.ask(client, "GET", f"/v1/stream/{link['path']}?offset={link['acked_offset']}", {200})
                acks.append({"stream": link["path"], "offset": link["tail_offset"]})
        if workload.rng.random() < 0.1:
            return
        body = {"wake_id": claim["wake_id"], "generation": claim["generation"], "acks": acks, "done": True}
        acked = await self._send_once(client, "ack", body, {"Authorization": f"Bearer {claim['token']}"})
        if acked is not None and acked.status == 200:
            self._acked.update((ack["stream"], ack["offset"]) for ack in acks)
            workload.counts["acks"] += 1
        elif acked is not None and acked.status not in {401, 409}:
            raise Violation(f"ack: {acked.status} {acked.body!r}")

    async def _send_once(
        self, client: Client, action: str, body: dict[str, object], headers: dict[str, str] | None = None
    ) -> Reply | None:
        """Send the request once; None if the answer was lost."""
        while True:
            try:
                reply = await client.request(
                    "POST",
                    f"{self._subscription}/{action}",
                    {"Content-Type": "application/json", **(headers or {})},
                    json.dumps(body).encode(),
                )
                return None if reply.status in self._workload.busy else reply
            except NotSent:
                await asyncio.sleep(RETRY_S)
            except Lost:
                return None
