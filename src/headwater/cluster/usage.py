"""Limits of the whole server: every worker knows the usage of the others, at most about a second old.

A worker reports its usage to the others once a second if it has changed, so an idle server exchanges nothing. A limit
is not divided by the number of workers: one stream may use all of it. Between two reports, the workers together can
therefore exceed a limit by as much as they accept within a second.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from headwater.cluster.peers import Peer, PeerLostError, Peers
from headwater.engine.namespaces import Namespaces, NamespaceUsage
from headwater.http.context import Context

EVERY_S: Final = 1.0


class SharedUsage:
    def __init__(self, peers: Peers, context: Context) -> None:
        self._peers = peers
        self._context = context
        self._changed: dict[int, set[str]] = {}
        """By worker: the namespaces whose usage changed since it last asked."""
        self._reported: dict[int, dict[str, NamespaceUsage]] = {}
        """By worker: the usage of namespaces that it reported."""
        self._sent: tuple[int, ...] = ()
        self._used: dict[int, tuple[int, ...]] = {}
        """By worker: the usage that it reported."""
        peers.on_usage = self._on_report
        peers.answers("namespaces", self._report_namespaces)
        peers.on_connected.append(self._report_to)
        peers.on_disconnected.append(self._forget)

    async def run(self) -> None:
        """Report the usage of this worker regularly."""
        while True:
            await asyncio.sleep(EVERY_S)
            usage = self._usage()
            if usage != self._sent:
                self._sent = usage
                for peer in self._peers.all():
                    peer.report(usage)
            namespaces = self._context.engine.quota.namespaces
            if namespaces is not None:
                await self._ask_namespaces(namespaces)

    def _report_to(self, peer: Peer) -> None:
        peer.report(self._usage())

    def _on_report(self, worker: int, usage: Any) -> None:
        self._used[worker] = tuple(usage)
        self._add_up()

    def _add_up(self) -> None:
        content, metadata, connections, sessions, cursors = (
            sum(used) for used in zip((0, 0, 0, 0, 0), *self._used.values(), strict=True)
        )
        context = self._context
        quota = context.engine.quota
        quota.content_elsewhere, quota.metadata_elsewhere = content, metadata
        context.connections.elsewhere, context.follow_sessions.elsewhere = connections, sessions
        context.engine.follows.elsewhere = cursors

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

    # -- quotas of namespaces --------------------------------------------------------------------------------------

    async def _ask_namespaces(self, namespaces: Namespaces) -> None:
        for peer in self._peers.all():
            try:
                is_all, usage = await peer.ask("namespaces")
            except PeerLostError:
                continue
            known = self._reported.setdefault(peer.worker, {})
            if is_all:
                known.clear()
            known.update((name, NamespaceUsage(*counts)) for name, counts in usage.items())
            for name in [name for name, used in known.items() if not any(used.counts())]:
                del known[name]
        total: dict[str, NamespaceUsage] = {}
        for reported in self._reported.values():
            for name, used in reported.items():
                before = total.get(name, NamespaceUsage())
                sums = (one + other for one, other in zip(before.counts(), used.counts(), strict=True))
                total[name] = NamespaceUsage(*sums)
        namespaces.elsewhere = total

    async def _report_namespaces(self, sender: int, arguments: Any) -> tuple[bool, dict[str, tuple[int, ...]]]:
        """The usage of all namespaces here, or of those that changed since the sender last asked."""
        namespaces = self._context.engine.quota.namespaces
        if namespaces is None:
            return True, {}
        here, changed = namespaces.here(), self._changed.get(sender)
        is_all = changed is None
        names = set(here) if changed is None else set(changed)
        if changed is None:
            namespaces.watchers.append(self._changed.setdefault(sender, set()))
        else:
            changed.clear()
        return is_all, {name: here.get(name, NamespaceUsage()).counts() for name in names}

    def _forget(self, worker: int) -> None:
        """What was reported may not have arrived: report everything next time."""
        self._used.pop(worker, None)
        self._add_up()
        changed, namespaces = self._changed.pop(worker, None), self._context.engine.quota.namespaces
        if changed is not None and namespaces is not None:
            namespaces.watchers = [watcher for watcher in namespaces.watchers if watcher is not changed]
