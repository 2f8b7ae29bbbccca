"""What the owner of a shard has committed, for the standbys of the shard that serve reads.

A batch is published when Postgres has confirmed that it is replicated, and acknowledged after that. So everything up to
the last published record is replicated, and everything that was acknowledged before the question is in the answer. The
question reaches the owner like any other frame, while its lease is valid.
"""

from __future__ import annotations

import asyncio
from typing import Final

from headwater.cluster.nodes.standby import CommittedPosition
from headwater.cluster.peers import PeerLostError, Peers
from headwater.core.errors import WorkerUnavailable
from headwater.engine.engine import Engine
from headwater.engine.stream import LiveStream
from headwater.storage.journaled_store import JournaledStorage

QUESTION: Final = "committed"
WAIT_S: Final = 1.0
"""How long an answer waits for a further record."""


class CommittedAnswers:
    """The owner's side."""

    def __init__(self, engine: Engine, storage: JournaledStorage, epoch: int, peers: Peers) -> None:
        self._engine = engine
        self._storage = storage
        self._epoch = epoch
        self._is_watching = False
        self._changed: asyncio.Future[None] | None = None
        peers.answers(QUESTION, self._answer)

    async def _answer(self, sender: int, after_lsn: int | None) -> CommittedPosition:
        """Return the committed position; if it is not after `after_lsn`, wait up to `WAIT_S` for a further record."""
        if after_lsn is not None and self._storage.published_lsn <= after_lsn:
            self._watch()
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._changed,), timeout=WAIT_S)
        return CommittedPosition(self._epoch, self._storage.published_lsn)

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._engine.watch_changes(self._on_changed)

    def _on_changed(self, _stream: LiveStream) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)


def forward_questions(standbys: Peers, owners: Peers) -> None:
    """Pass the questions of this node's standbys on to the owners of their shards."""

    async def ask_owner(shard: int, after_lsn: int | None) -> object:
        try:
            return await owners.ask(shard, QUESTION, after_lsn)
        except PeerLostError as lost:
            raise WorkerUnavailable(str(lost)) from None

    standbys.answers(QUESTION, ask_owner)
