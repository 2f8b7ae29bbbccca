"""Ports for programs that need their port before they listen.

Invariant: they lie below those that the system gives out by itself, and no two tests of a run get the same, whichever
of its processes they run in; so a port stays free between being chosen and being used, and between two uses.
"""

from __future__ import annotations

import itertools
import os
import random
import socket

LOWEST = 12_000
PER_PROCESS = 2_500
PROCESSES = 8
"""At least as many as `make test` has."""

_process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PROCESSES
_first = LOWEST + _process * PER_PROCESS
# Begin at a random port, without a seed: otherwise two simultaneous runs would try the same ports.
_begin = random.SystemRandom().randrange(PER_PROCESS)
_candidates = (_first + (_begin + step) % PER_PROCESS for step in itertools.count())


def free_port() -> int:
    """Return a free port."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return as many consecutive free ports."""
    found: list[int] = []
    for port in itertools.islice(_candidates, PER_PROCESS):
        if found and found[-1] != port - 1:
            found.clear()
        if not _is_free(port):
            found.clear()
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} free ports in a row from {_first} on")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
