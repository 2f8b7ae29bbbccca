"""The order of webhook calls: hosts take turns, and hosts that do not respond cannot use up all slots.

A call holds one of `concurrency` slots until its receiver responds or the call times out, so a receiver that is down
holds a slot for the full timeout. Three rules keep such receivers from delaying the others:

- One host holds at most `per_host` slots, and only one unless it responded quickly to its last call.
- Hosts that did not respond to their last call hold at most a quarter of all slots; together with hosts that were not
called
  yet, at most three quarters. So there is always a slot for hosts that respond.
- Among the hosts that may be called, the one that waited longest for its turn is next, however many calls it has.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from enum import Enum, auto
from typing import Final, Generic, TypeVar

KNOWN_HOSTS_MAX: Final = 10_000
"""Idle hosts whose health is kept; the least recently called one is dropped first."""

CallT = TypeVar("CallT")


class HostHealth(Enum):
    """The result of the last call to a host."""

    RESPONSIVE = auto()
    UNKNOWN = auto()
    UNRESPONSIVE = auto()


class _Host(Generic[CallT]):
    __slots__ = ("active", "health", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.health = HostHealth.UNKNOWN
        self.active = 0
        self.waiting: deque[CallT] = deque()


class CallQueue(Generic[CallT]):
    def __init__(self, concurrency: int, per_host: int) -> None:
        self._concurrency = concurrency
        self._per_host = per_host
        self._unresponsive_max = max(1, concurrency // 4)
        self._unproven_max = max(1, concurrency * 3 // 4)
        self._hosts: OrderedDict[str, _Host[CallT]] = OrderedDict()
        """In the order of their last call."""
        self._turns: dict[HostHealth, OrderedDict[str, int]] = {health: OrderedDict() for health in HostHealth}
        """Hosts with a waiting call that may be made, in the order of their turns."""
        self._next_turn = itertools.count()
        self._active: dict[HostHealth, int] = dict.fromkeys(HostHealth, 0)

    def __len__(self) -> int:
        """The number of waiting calls."""
        return sum(len(host.waiting) for host in self._hosts.values())

    def add(self, host_name: str, call: CallT) -> None:
        host = self._hosts.get(host_name)
        if host is None:
            host = self._hosts[host_name] = _Host(host_name)
            self._drop_idle_hosts()
        host.waiting.append(call)
        self._queue_turn(host)

    def take(self) -> tuple[str, CallT] | None:
        """The next call to make and its host; None if no slot is free for a waiting call.

        `finished` must be called with the host when the call has ended.
        """
        if sum(self._active.values()) >= self._concurrency:
            return None
        open_turns = [turns for health, turns in self._turns.items() if turns and self._has_slot(health)]
        if not open_turns:
            return None
        name, _ = min(open_turns, key=lambda turns: next(iter(turns.values()))).popitem(last=False)
        host = self._hosts[name]
        call = host.waiting.popleft()
        host.active += 1
        self._active[host.health] += 1
        self._hosts.move_to_end(name)
        self._queue_turn(host)
        return name, call

    def finished(self, host_name: str, health: HostHealth | None) -> None:
        """Record the end of a call, and the health of its host; None if the call was cancelled."""
        host = self._hosts[host_name]
        self._active[host.health] -= 1
        host.active -= 1
        if health is not None and health is not host.health:
            self._turns[host.health].pop(host_name, None)
            self._active[host.health] -= host.active
            self._active[health] += host.active
            host.health = health
        self._queue_turn(host)

    def clear(self) -> None:
        """Drop all waiting calls."""
        for host in self._hosts.values():
            host.waiting.clear()
        for turns in self._turns.values():
            turns.clear()

    def _queue_turn(self, host: _Host[CallT]) -> None:
        limit = self._per_host if host.health is HostHealth.RESPONSIVE else 1
        if host.waiting and host.active < limit and host.name not in self._turns[host.health]:
            self._turns[host.health][host.name] = next(self._next_turn)

    def _has_slot(self, health: HostHealth) -> bool:
        if health is HostHealth.RESPONSIVE:
            return True
        unresponsive = self._active[HostHealth.UNRESPONSIVE]
        if health is HostHealth.UNRESPONSIVE and unresponsive >= self._unresponsive_max:
            return False
        return unresponsive + self._active[HostHealth.UNKNOWN] < self._unproven_max

    def _drop_idle_hosts(self) -> None:
        while len(self._hosts) > KNOWN_HOSTS_MAX:
            oldest = next((host for host in self._hosts.values() if not host.active and not host.waiting), None)
            if oldest is None:
                return
            del self._hosts[oldest.name]
