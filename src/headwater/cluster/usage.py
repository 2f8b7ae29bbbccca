"""Limits of the whole server: every worker knows the usage of the others.

A limit is not divided by the number of workers: one stream may use all of it. A worker reports its usage to the others
once a second if it has changed, so an idle server exchanges nothing, and at once if the change since the last report is
more than its share of what is left of a limit. Such a report is sent before the response to the request that caused it,
so a client that has the response finds the limit up to date at every worker. What several workers accept at the same
moment can still exceed a limit: by one request of each, or by a hundredth of what was left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from headwater.cluster.peers import Peer, Peers
from headwater.engine.committer import guarded
from headwater.engine.namespaces import Namespaces, NamespaceUsage
from headwater.http.context import Context

EVERY_S: Final = 1.0
UNREPORTED: Final = 100
"""All workers together leave at most one part in so many of what is left of a limit unreported."""

Counts: TypeAlias = tuple[int, ...]
_NOTHING: Final = (0, 0, 0, 0, 0, 0, 0)
_UNUSED: Final = NamespaceUsage()


class SharedUsage:
    def __init__(self, peers: Peers, context: Context) -> None:
        self._peers = peers
        self._context = context
        engine = context.engine
        self._namespaces = engine.quota.namespaces
        self._parts: Final = UNREPORTED * peers.workers
        sessions = context.follow_sessions
        # The quota compares its bytes itself, because they change with every append.
        self._limits: Final = (
            0,
            0,
            context.connections.limit,
            sessions.limit,
            sessions.max_streams,
            sessions.max_streams,
            engine.leases.max_leases,
        )
        self._sent: Counts = _NOTHING
        self._elsewhere: Counts = _NOTHING
        self._used: dict[int, Counts] = {}
        """By worker: the usage that it reported."""
        self._changed: set[str] = set()
        """Namespaces whose usage changed since the last report."""
        self._sent_namespaces: dict[str, Counts] = {}
        self._used_namespaces: dict[int, dict[str, Counts]] = {}
        """By worker: the usage of namespaces that it reported."""
        peers.on_usage = self._on_report
        peers.on_connected.append(self._report_to)
        peers.on_disconnected.append(self._forget)
        engine.quota.on_change = self._report
        context.connections.on_change = sessions.on_change = self._on_change
        engine.follows.on_change = engine.leases.on_change = self._on_change
        if self._namespaces is not None:
            self._namespaces.on_change = self._on_namespace
        self._add_up()

    async def run(self) -> None:
        """Report the usage of this worker regularly."""
        while True:
            await asyncio.sleep(EVERY_S)
            if self._changed or self._usage() != self._sent:
                guarded(self._report)

    # -- reports of this worker ------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Report what has changed."""
        self._sent = self._usage()
        changed = self._usage_of(self._changed)
        self._changed.clear()
        for name, used in changed.items():
            if any(used):
                self._sent_namespaces[name] = used
            else:
                self._sent_namespaces.pop(name, None)
        for peer in self._peers.all():
            peer.report((self._sent, False, changed))
        self._watch_bytes()

    def _report_to(self, peer: Peer) -> None:
        """Report everything to a worker that has just been connected."""
        peer.report((self._usage(), True, self._usage_of(self._namespaces.here() if self._namespaces else ())))

    def _usage(self) -> Counts:
        context = self._context
        quota = context.engine.quota
        return (
            quota.content_bytes,
            quota.metadata_bytes,
            len(context.connections),
            len(context.follow_sessions),
            context.follow_sessions.named,
            context.engine.follows.cursors,
            len(context.engine.leases),
        )

    def _usage_of(self, names: Iterable[str]) -> dict[str, Counts]:
        here = self._namespaces.here() if self._namespaces is not None else {}
        return {name: here.get(name, _UNUSED).counts() for name in names}

    # -- changes that cannot wait ----------------------------------------------------------------------------------

    def _on_change(self) -> None:
        if self._is_urgent(self._usage(), self._sent, self._elsewhere, self._limits):
            self._report()

    def _on_namespace(self, name: str) -> None:
        self._changed.add(name)
        namespaces = self._namespaces
        assert namespaces is not None
        used = namespaces.here().get(name, _UNUSED).counts()
        sent = self._sent_namespaces.get(name) or _UNUSED.counts()
        if self._is_urgent(
            used, sent, namespaces.elsewhere.get(name, _UNUSED).counts(), namespaces.limits_of(name).counts()
        ):
            self._report()

    def _is_urgent(self, used: Counts, sent: Counts, elsewhere: Counts, limits: Counts) -> bool:
        for here, reported, others, limit in zip(used, sent, elsewhere, limits, strict=True):
            if limit and here != reported and abs(here - reported) * self._parts > limit - here - others:
                return True
        return False

    def _watch_bytes(self) -> None:
        self._context.engine.quota.watch(self._sent[0], self._sent[1], self._parts)

    # -- reports of the others -------------------------------------------------------------------------------------

    def _on_report(self, worker: int, report: Any) -> None:
        usage, is_all, namespaces = report
        self._used[worker] = tuple(usage)
        self._add_up()
        if worker < self._peers.worker:
            # Both may have begun to follow streams at the same moment; one of them ends what exceeds the limit.
            self._context.engine.follows.end_excess()
        self._on_change()
        if self._namespaces is not None:
            self._add_up_namespaces(self._namespaces, worker, namespaces, is_all=is_all)

    def _add_up(self) -> None:
        self._elsewhere = tuple(sum(used) for used in zip(_NOTHING, *self._used.values(), strict=True))
        context = self._context
        quota, sessions = context.engine.quota, context.follow_sessions
        (
            quota.content_elsewhere,
            quota.metadata_elsewhere,
            context.connections.elsewhere,
            sessions.elsewhere,
            sessions.named_elsewhere,
            context.engine.follows.elsewhere,
            context.engine.leases.elsewhere,
        ) = self._elsewhere
        self._watch_bytes()

    def _add_up_namespaces(
        self, namespaces: Namespaces, worker: int, reported: dict[str, Counts], *, is_all: bool
    ) -> None:
        known = self._used_namespaces.setdefault(worker, {})
        for name in {*reported, *known} if is_all else reported:
            used = reported.get(name, ())
            if any(used):
                known[name] = tuple(used)
            else:
                known.pop(name, None)
            reports = [by[name] for by in self._used_namespaces.values() if name in by]
            if reports:
                namespaces.elsewhere[name] = NamespaceUsage(*map(sum, zip(*reports, strict=True)))
            else:
                namespaces.elsewhere.pop(name, None)
            if name in self._changed:
                self._on_namespace(name)

    def _forget(self, worker: int) -> None:
        """Forget a worker that ended. The streams of its namespaces still exist, and it reports them again."""
        self._used.pop(worker, None)
        self._add_up()
