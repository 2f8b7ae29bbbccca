"""File descriptors of the process: raise the limit at startup, and divide it between connections and files.

Connections must not use up the descriptors that storage needs: without one, data in the log cannot be moved to packs.
So the limit (`ulimit -n`) bounds the number of connections where `server.max_connections` is higher.
"""

from __future__ import annotations

import logging
import resource
from typing import TYPE_CHECKING, Final

from headwater.operating_system import SYSTEM
from headwater.storage.descriptor_reserve import RESERVE
from headwater.storage.packs.pack_set import FANOUT, OPEN_MAX

if TYPE_CHECKING:
    from headwater.config import Settings

log = logging.getLogger("headwater.engine")

SOFT_MAX: Final = 1_048_576
"""The limit is not raised beyond this; where the hard limit is unlimited, the kernel accepts no more."""
PACK_SHARE: Final = 8
"""At most one descriptor in eight is an open pack, which then takes two."""

_PER_PACK: Final = 2
_PER_DATABASE: Final = 3
_OTHERS: Final = 48
"""Sockets that listen, the log, locks, the event loop, threads, standard streams, keys and certificates."""


def raise_limit() -> int:
    """Raise the soft limit on open files to the hard one; returns the limit that now applies."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SOFT_MAX if hard == resource.RLIM_INFINITY else min(hard, SOFT_MAX)
    if SYSTEM.open_files_max is not None:
        wanted = min(wanted, SYSTEM.open_files_max)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return min(soft, SOFT_MAX) if soft != resource.RLIM_INFINITY else SOFT_MAX
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit on open files stays at %d: %s", soft, error)
        return soft
    return wanted


def packs_max(limit: int) -> int:
    """How many packs may be open for reading at once."""
    return max(4, min(OPEN_MAX, limit // PACK_SHARE))


def connections_max(settings: Settings, limit: int) -> int:
    """How many connections to hold at once: what is configured, or what the limit on open files leaves for them."""
    wanted = settings.server.max_connections
    most = max(1, limit - _needed_elsewhere(settings, limit))
    if most < wanted:
        log.warning(
            "server.max_connections is %d, but the limit on open files (%d) leaves room for %d connections;"
            " raise it (ulimit -n) for more",
            wanted,
            limit,
            most,
        )
    return min(wanted, most)


def _needed_elsewhere(settings: Settings, limit: int) -> int:
    needed = _OTHERS + settings.subscriptions.webhook_concurrency
    if settings.storage.mode == "acid":
        needed += RESERVE + _PER_DATABASE * settings.storage.acid_shard_count
    elif settings.storage.mode != "memory":
        needed += RESERVE + _PER_PACK * (packs_max(limit) + FANOUT)
    return needed
