"""File descriptors of the process: raise the limit at startup, and divide it between connections and files.

Connections must not use up the descriptors that storage needs: without them, no checkpoint can be made.
So the limit (`ulimit -n`) also limits the number of connections, if `server.max_connections` is higher.
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
"""The limit is not raised beyond this; the kernel accepts no more even if the hard limit is unlimited."""
PACK_SHARE: Final = 8
"""At most an eighth of the limit is the number of open packs; each uses two descriptors."""

_PER_PACK: Final = 2
_PER_DATABASE: Final = 3
_OTHERS: Final = 48
"""Listening sockets, the journal, locks, the event loop, threads, standard streams, keys and certificates."""


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
    """The maximum number of packs that are open for reading."""
    return max(4, min(OPEN_MAX, limit // PACK_SHARE))


def connections_max(settings: Settings, limit: int) -> int:
    """The maximum number of connections: the configured one, or fewer if the limit on open files requires it."""
    configured = settings.server.max_connections
    most = max(1, limit - _needed_elsewhere(settings, limit))
    if most < configured:
        log.warning(
            "server.max_connections is %d, but the limit on open files (%d) allows only %d connections;"
            " raise it (ulimit -n) for more",
            configured,
            limit,
            most,
        )
    return min(configured, most)


def _needed_elsewhere(settings: Settings, limit: int) -> int:
    needed = _OTHERS + settings.subscriptions.webhook_concurrency
    if settings.storage.mode == "acid":
        needed += RESERVE + _PER_DATABASE * settings.storage.acid_shard_count
    elif settings.storage.mode != "memory":
        needed += RESERVE + _PER_PACK * (packs_max(limit) + FANOUT)
    return needed
