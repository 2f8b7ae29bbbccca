"""Quotas: how much the streams of one namespace may hold together, and how many live readers they may have.

The namespace of a stream is the first segment of a name that has several (`tenant-a` of `tenant-a/orders/1`), or its
bucket (`/ds/room-1`). Other streams have none, and no quota. Usage is counted only while there is a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.core.buckets import BUCKET_ROOT
from headwater.core.errors import NamespaceFull, TooManyReaders


@dataclass(frozen=True, slots=True)
class NamespaceLimits:
    """What one namespace may have; 0 means no limit."""

    max_bytes: int = 0
    max_streams: int = 0
    max_readers: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceRule:
    """The limits of every namespace, and those of namespaces with their own."""

    common: NamespaceLimits = NamespaceLimits()
    own: Mapping[str, NamespaceLimits] = field(default_factory=dict)

    @property
    def limits_anything(self) -> bool:
        return self.common != NamespaceLimits() or bool(self.own)


class NamespaceUsage:
    """What one namespace has now."""

    __slots__ = ("bytes", "readers", "streams")

    def __init__(self) -> None:
        self.bytes = 0
        self.streams = 0
        self.readers = 0


class Namespaces:
    def __init__(self, rule: NamespaceRule) -> None:
        self._rule = rule
        self._usage: dict[str, NamespaceUsage] = {}
        self.refusals = {"bytes": 0, "streams": 0, "readers": 0}

    def reported(self) -> dict[str, NamespaceUsage]:
        """The namespaces with their own limits: few enough to be labels of metrics."""
        return {name: self._usage.get(name) or NamespaceUsage() for name in self._rule.own}

    def check_create(self, name: str, size: int) -> None:
        namespace = namespace_of(name)
        if namespace is None:
            return
        limit = self._limits(namespace).max_streams
        usage = self._usage.get(namespace)
        if limit and usage is not None and usage.streams >= limit:
            self.refusals["streams"] += 1
            raise NamespaceFull(f"Namespace {namespace!r} has {usage.streams} streams; its quota is {limit}.")
        self.check_bytes(name, size)

    def check_bytes(self, name: str, size: int) -> None:
        namespace = namespace_of(name)
        if namespace is None or not size:
            return
        limit = self._limits(namespace).max_bytes
        usage = self._usage.get(namespace)
        held = usage.bytes if usage is not None else 0
        if limit and held + size > limit:
            self.refusals["bytes"] += 1
            raise NamespaceFull(
                f"Namespace {namespace!r} would have {held + size} bytes; its quota is {limit}."
                " Delete streams, or let retention drop old messages."
            )

    def check_reader(self, name: str) -> None:
        namespace = namespace_of(name)
        if namespace is None:
            return
        limit = self._limits(namespace).max_readers
        usage = self._usage.get(namespace)
        if limit and usage is not None and usage.readers >= limit:
            self.refusals["readers"] += 1
            raise TooManyReaders(
                f"Namespace {namespace!r} has {usage.readers} live readers; its quota is {limit}.",
                (("Retry-After", "5"),),
            )

    def add(self, name: str, *, size: int = 0, streams: int = 0, readers: int = 0) -> None:
        """Count additions, or removals with negative numbers."""
        namespace = namespace_of(name)
        if namespace is None:
            return
        usage = self._usage.get(namespace)
        if usage is None:
            usage = self._usage[namespace] = NamespaceUsage()
        usage.bytes += size
        usage.streams += streams
        usage.readers += readers
        if not usage.streams and not usage.readers:
            del self._usage[namespace]

    def _limits(self, namespace: str) -> NamespaceLimits:
        return self._rule.own.get(namespace, self._rule.common)


def namespace_of(name: str) -> str | None:
    """The namespace of a stream, if it has one."""
    start = len(BUCKET_ROOT) if name.startswith(BUCKET_ROOT) else 0
    end = name.find("/", start)
    return name[:end] if end > 0 else None
