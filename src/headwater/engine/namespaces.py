"""Quotas of namespaces: limits on the bytes, streams, live readers and connections of each namespace.

The namespace of a stream is the first segment of a name that has several (`tenant-a` of `tenant-a/orders/1`), or its
bucket (`/ds/room-1`). Other streams have no namespace, and no quota. Usage is counted only if there is a limit.

A connection belongs to a namespace while it serves a request of it: a client, or a proxy in front of many clients, may
send the next request of the connection to another namespace. An idle connection does not belong to any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headwater.core.buckets import BUCKET_ROOT
from headwater.core.errors import NamespaceBusy, NamespaceFull, TooManyReaders
from headwater.core.plurals import counted


@dataclass(frozen=True, slots=True)
class NamespaceLimits:
    """The limits of one namespace; 0 means no limit."""

    max_bytes: int = 0
    max_streams: int = 0
    max_readers: int = 0
    max_connections: int = 0

    def counts(self) -> tuple[int, int, int, int]:
        """In the order of `NamespaceUsage.counts`."""
        return self.max_bytes, self.max_streams, self.max_readers, self.max_connections


@dataclass(frozen=True, slots=True)
class NamespaceRule:
    """The limits of every namespace, and those of namespaces with their own."""

    common: NamespaceLimits = NamespaceLimits()
    own: Mapping[str, NamespaceLimits] = field(default_factory=dict)

    @property
    def limits_anything(self) -> bool:
        return self.common != NamespaceLimits() or bool(self.own)

    @property
    def limits_connections(self) -> bool:
        return any(limits.max_connections for limits in (self.common, *self.own.values()))


class NamespaceUsage:
    """The current usage of one namespace."""

    __slots__ = ("bytes", "connections", "readers", "streams")

    def __init__(self, bytes_: int = 0, streams: int = 0, readers: int = 0, connections: int = 0) -> None:
        self.bytes = bytes_
        self.streams = streams
        self.readers = readers
        self.connections = connections

    def counts(self) -> tuple[int, int, int, int]:
        return self.bytes, self.streams, self.readers, self.connections


class Namespaces:
    def __init__(self, rule: NamespaceRule) -> None:
        self._rule = rule
        self._usage: dict[str, NamespaceUsage] = {}
        self.elsewhere: dict[str, NamespaceUsage] = {}
        """What the same namespaces have in other workers, as far as it is known."""
        self.on_change: Callable[[str], None] | None = None
        """Called with a namespace after its usage changed here."""
        self.counts_connections = rule.limits_connections
        self.refusals = {"bytes": 0, "streams": 0, "readers": 0, "connections": 0}

    def reported(self) -> dict[str, NamespaceUsage]:
        """The namespaces with their own limits: few enough to be labels of metrics."""
        return {name: self._usage.get(name) or NamespaceUsage() for name in self._rule.own}

    def here(self) -> dict[str, NamespaceUsage]:
        """The usage in this process."""
        return self._usage

    def check_create(self, name: str, size: int) -> None:
        namespace = namespace_of(name)
        if namespace is None:
            return
        limit = self.limits_of(namespace).max_streams
        usage = self._total(namespace)
        if limit and usage is not None and usage.streams >= limit:
            self.refusals["streams"] += 1
            raise NamespaceFull(
                f"Namespace {namespace!r} has {counted(usage.streams, 'stream')}, and its quota is {limit}. Delete"
                " streams"
                f" of the namespace, or raise {self._setting(namespace, 'max_streams')}."
            )
        self.check_bytes(name, size)

    def check_bytes(self, name: str, size: int) -> None:
        namespace = namespace_of(name)
        if namespace is None or not size:
            return
        limit = self.limits_of(namespace).max_bytes
        usage = self._total(namespace)
        held = usage.bytes if usage is not None else 0
        if limit and held + size > limit:
            self.refusals["bytes"] += 1
            raise NamespaceFull(
                f"Namespace {namespace!r} has {counted(held, 'byte')} and the request adds {size}; its quota is"
                f" {limit}."
                " Delete streams of the namespace, let retention drop old messages, or raise"
                f" {self._setting(namespace, 'max_bytes')}."
            )

    def check_reader(self, name: str) -> None:
        namespace = namespace_of(name)
        if namespace is None:
            return
        limit = self.limits_of(namespace).max_readers
        usage = self._total(namespace)
        if limit and usage is not None and usage.readers >= limit:
            self.refusals["readers"] += 1
            raise TooManyReaders(
                f"Namespace {namespace!r} has {counted(usage.readers, 'live reader')}, and its quota is {limit}. Retry"
                f" later, end unused readers, or raise {self._setting(namespace, 'max_readers')}.",
                (("Retry-After", "5"),),
            )

    def begin_request(self, name: str) -> str | None:
        """Count the connection of a request; `end_request` needs the namespace that is returned."""
        namespace = namespace_of(name)
        if namespace is None:
            return None
        limit = self.limits_of(namespace).max_connections
        usage = self._total(namespace)
        if limit and usage is not None and usage.connections >= limit:
            self.refusals["connections"] += 1
            raise NamespaceBusy(
                f"Namespace {namespace!r} uses {counted(usage.connections, 'connection')}, and its quota is {limit}."
                " Retry later, send fewer requests at the same time, end unused live reads, or raise"
                f" {self._setting(namespace, 'max_connections')}.",
                (("Retry-After", "1"),),
            )
        return self.resume_request(namespace)

    def resume_request(self, namespace: str) -> str:
        """Count the connection of a request that was accepted before."""
        self._count(namespace, connections=1)
        return namespace

    def end_request(self, namespace: str) -> None:
        self._count(namespace, connections=-1)

    def add(self, name: str, *, size: int = 0, streams: int = 0, readers: int = 0) -> None:
        """Count additions, or removals with negative numbers."""
        namespace = namespace_of(name)
        if namespace is not None:
            self._count(namespace, size, streams, readers)

    def _total(self, namespace: str) -> NamespaceUsage | None:
        usage, elsewhere = self._usage.get(namespace), self.elsewhere.get(namespace)
        if usage is None or elsewhere is None:
            return usage or elsewhere
        return NamespaceUsage(*(one + other for one, other in zip(usage.counts(), elsewhere.counts(), strict=True)))

    def _count(
        self, namespace: str, size: int = 0, streams: int = 0, readers: int = 0, *, connections: int = 0
    ) -> None:
        usage = self._usage.get(namespace)
        if usage is None:
            usage = self._usage[namespace] = NamespaceUsage()
        usage.bytes += size
        usage.streams += streams
        usage.readers += readers
        usage.connections += connections
        if not usage.streams and not usage.readers and not usage.connections:
            del self._usage[namespace]
        if self.on_change is not None:
            self.on_change(namespace)

    def limits_of(self, namespace: str) -> NamespaceLimits:
        return self._rule.own.get(namespace, self._rule.common)

    def _setting(self, namespace: str, name: str) -> str:
        """The setting that an operator raises."""
        if namespace in self._rule.own:
            return f"{namespace}:{name.removeprefix('max_')} in quotas.namespaces"
        return f"quotas.{name}"


def namespace_of(name: str) -> str | None:
    """The namespace of a stream, if it has one."""
    start = len(BUCKET_ROOT) if name.startswith(BUCKET_ROOT) else 0
    end = name.find("/", start)
    return name[:end] if end > 0 else None
