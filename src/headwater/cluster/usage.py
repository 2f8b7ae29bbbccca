"""Limits of the whole server: every worker knows the usage of the others, at most about a second old.

A limit is not divided by the number of workers: one stream may use all of it. Between two reports, the workers together
can therefore exceed a limit by as much as they accept within a second.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from headwater.cluster.peers import PeerLostError, Peers
from headwater.http.context import Context

EVERY_S: Final = 1.0


class SharedUsage:
    def __init__(self, peers: Peers, context: Context) -> None:
        self._peers = peers
        self._context = context
        peers.answers("usage", self._report)

    async def run(self) -> None:
        """Ask the others about their usage regularly."""
        while True:
            await asyncio.sleep(EVERY_S)
            totals = [0] * len(self._usage())
            for peer in self._peers.all():
                try:
                    reported = await peer.ask("usage")
                except PeerLostError:
                    continue
                totals = [total + one for total, one in zip(totals, reported, strict=True)]
            context = self._context
            quota = context.engine.quota
            quota.content_elsewhere, quota.metadata_elsewhere = totals[:2]
            context.connections.elsewhere, context.follow_sessions.elsewhere = totals[2:4]
            context.engine.follows.elsewhere = totals[4]

    async def _report(self, sender: int, arguments: Any) -> tuple[int, ...]:
        return self._usage()

    def _usage(self) -> tuple[int, ...]:
        context = self._context
        quota = context.engine.quota
        return (
            quota.content_bytes,
            quota.metadata_bytes,
            len(context.connections),
            len(context.follow_sessions),
            context.engine.follows.cursors,
        )
