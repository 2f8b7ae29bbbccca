"""Write fencing with several workers: any worker may have a fenced stream, and the coordinator has the claims.

The worker of the stream asks the coordinator for the claim of a write token, and then decides the append against its
own fence. When a claim ends, the coordinator first has the fenced streams of the claim sealed: responses, wakes and
webhooks that show the end wait until every worker has stored its seal. So a write that was checked against a claim is
either decided before anyone can know that the claim has ended, or refused because of the seal.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from headwater.cluster.mirror import Mirror
from headwater.cluster.prepared_responses import PreparedResponse
from headwater.cluster.relay import Relay, unavailable
from headwater.cluster.shards import COORDINATOR
from headwater.core.errors import Refusal
from headwater.core.fencing import WriteClaim
from headwater.core.subscription_errors import TokenInvalid
from headwater.engine.engine import Engine
from headwater.engine.fences import ClaimSource, ClaimState
from headwater.http import paths
from headwater.http.append import credentials_of
from headwater.http.context import Context
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import AnyResponse
from headwater.http.routing import Route

SEAL: Final = "seal"
CLAIM: Final = "claim"
RETRY_S: Final = 0.1
CLAIMS_MAX: Final = 10_000
"""Claims and subscriptions that a worker caches while it processes their appends."""


class SealedStreams:
    """Seals the fenced streams of this worker when the coordinator ends a claim."""

    def __init__(self, engine: Engine, relay: Relay) -> None:
        self._engine = engine
        self._relay = relay
        relay.peers.answers(SEAL, self._seal)

    async def _seal(self, sender: int, arguments: Any) -> None:
        """Seal a generation. Returns when that is durable, or when nothing can be written any more."""
        names, authority, generation = arguments
        durable: asyncio.Future[None] = self._relay.loop.create_future()

        def done(_: object) -> None:
            if not durable.done():
                durable.set_result(None)

        with suppress(Refusal):
            self._engine.fences.seal(names, authority, generation)
            self._engine.after_all_pending(done, None)
            await durable


# -- the coordinator -------------------------------------------------------------------------------------------------


class AllFences:
    """The fences of all workers, for the coordinator's subscriptions."""

    def __init__(self, engine: Engine, mirror: Mirror, relay: Relay) -> None:
        self._engine = engine
        self._mirror = mirror
        self._relay = relay
        self._last = 0
        """The number of the last seal that was sent to another worker."""
        self._unanswered: dict[int, asyncio.Task[None]] = {}
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        """Callbacks that wait for all seals up to a number, in order."""
        relay.peers.answers(CLAIM, self._claim)

    @property
    def claims(self) -> ClaimSource | None:
        return self._engine.fences.claims

    @claims.setter
    def claims(self, claims: ClaimSource | None) -> None:
        self._engine.fences.claims = claims

    def has_any(self, names: Collection[str]) -> bool:
        return self._engine.fences.has_any(names) or any(name in names for name in self._mirror.fenced.values())

    def seal(self, names: Collection[str], authority: str, generation: int) -> None:
        self._engine.fences.seal(names, authority, generation)
        by_worker: dict[int, list[str]] = {}
        for stream_id, name in self._mirror.fenced.items():
            if name in names:
                by_worker.setdefault(self._mirror.owners[stream_id], []).append(name)
        for worker, sealed in by_worker.items():
            self._last += 1
            work = self._seal_elsewhere(self._last, worker, (sealed, authority, generation))
            self._unanswered[self._last] = self._relay.loop.create_task(work)

    @property
    def is_open(self) -> bool:
        return not self._unanswered and not self._waiting

    def then(self, do: Callable[[], None]) -> None:
        """Call `do` when all seals that were begun are stored."""
        if self.is_open:
            do()
        else:
            self._waiting.append((self._last, do))

    async def _seal_elsewhere(self, number: int, worker: int, seal: tuple[list[str], str, int]) -> None:
        while True:
            try:
                await self._relay.ask(worker, SEAL, seal)
                break
            except Refusal:
                await asyncio.sleep(RETRY_S)  # It is still being restarted.
        del self._unanswered[number]
        while self._waiting and self._waiting[0][0] < min(self._unanswered, default=self._last + 1):
            self._waiting.popleft()[1]()

    async def _claim(self, sender: int, arguments: Any) -> Any:
        """The claim of a write token and its current state, or why the token is not valid."""
        token, name = arguments
        claims = self._engine.fences.claims
        if claims is None:
            return "There are no subscriptions.", None, None
        try:
            claim = claims.read_write_token(token)
        except TokenInvalid as refusal:
            return refusal.detail, None, None
        state = claims.claim_state(claim.subscription)
        if state is not None:
            state = state._replace(streams=[name] if name in state.streams else [])
        return "", claim, state


# -- the other workers -----------------------------------------------------------------------------------------------


class CoordinatorClaims:
    """The claims of write tokens, as reported by the coordinator.

    Cached claims may have changed at the coordinator: then the stream is sealed, or the change is not visible yet.
    """

    def __init__(self, engine: Engine, relay: Relay) -> None:
        self._engine = engine
        self._relay = relay
        self._tokens: dict[str, WriteClaim | TokenInvalid] = {}
        self._states: dict[str, ClaimState | None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        engine.fences.claims = self
        relay.peers.on_disconnected.append(self._on_disconnected)

    # -- as the source of claims -----------------------------------------------------------------------------------

    def read_write_token(self, text: str) -> WriteClaim:
        found = self._tokens.get(text)
        if found is None:
            raise unavailable(COORDINATOR, self._relay.wait_s)
        if isinstance(found, Refusal):
            raise found
        return found

    def claim_state(self, subscription_id: str) -> ClaimState | None:
        return self._states[subscription_id]

    # -- appends ---------------------------------------------------------------------------------------------------

    def routes(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """The routes; appends with a token are postponed until its claim is known."""
        return tuple(self._asking(route) if _appends(route) else route for route in routes)

    def _asking(self, route: Route) -> Route:
        def handle(context: Context, request: Request, address: Address) -> AnyResponse:
            fences = self._engine.fences.streams
            credentials = credentials_of(request) if fences else None
            stream = self._engine.catalog.by_name.get(address.name) if credentials is not None else None
            if credentials is None or stream is None or stream.id not in fences:
                return route.handler(context, request, address)
            return PreparedResponse(
                partial(self._learn, credentials.text, address.name),
                partial(route.handler, context, request, address),
                self._run,
                request,
            )

        return replace(route, handler=handle)

    async def _learn(self, token: str, name: str) -> None:
        problem, claim, state = await self._relay.ask(COORDINATOR, CLAIM, (token, name))
        if len(self._tokens) >= CLAIMS_MAX or len(self._states) >= CLAIMS_MAX:
            self._forget()
        if problem:
            self._tokens[token] = TokenInvalid(problem)
            return
        known = self._tokens[token] = msgspec.convert(claim, WriteClaim)
        if state is None:
            self._states[known.subscription] = None
            return
        found = msgspec.convert(state, ClaimState)
        before = self._states.get(known.subscription)
        if before is not None and before._replace(streams=found.streams) == found:
            # Other appends of the same claim, to other streams, may be in progress.
            found = found._replace(streams=(set(before.streams) - {name}).union(found.streams))
        self._states[known.subscription] = found

    def _run(self, work: Any) -> None:
        task = self._relay.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_disconnected(self, worker: int) -> None:
        if worker == COORDINATOR:
            self._forget()

    def _forget(self) -> None:
        self._tokens.clear()
        self._states.clear()


def _appends(route: Route) -> bool:
    return route.method == "POST" and route.pattern in (paths.STREAM, paths.BUCKET_STREAM) and not route.live
