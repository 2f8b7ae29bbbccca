"""Settings of the Python interpreter that keep the event loop responsive.

Both the garbage collector and other threads hold the interpreter lock, and the event loop waits for it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Final

GC_THRESHOLDS: Final = (1_000, 3, 6_250)
"""New objects before a collection scans them: 0.5 ms. Every fourth collection scans the survivors of all four: 2 ms.
Shorter collections are not more expensive in total, because each object is scanned as often. The length of a full
collection has no limit, so it must be rare: after 25,000,000 new objects, and only when the number of objects has grown
by a quarter."""
SWITCH_S: Final = 0.001
"""How long the event loop waits until a thread that computes (a checkpoint, compression) must let it continue. It waits
again in each callback, so the default of 5 ms adds up."""


KEPT_MAX: Final = 256
"""The interpreter keeps up to 100 unused objects of a type for reuse, and uvloop 250."""


def keep_responsive(loop: asyncio.AbstractEventLoop) -> None:
    """Apply the settings after recovery, and exclude existing objects from garbage collection."""
    _fill_free_lists(loop)
    gc.unfreeze()  # Objects of an earlier recovery, before a pause.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)


def _fill_free_lists(loop: asyncio.AbstractEventLoop) -> None:
    """Fill the free lists of the interpreter and the event loop, so that their objects lie together.

    Otherwise the lists keep objects of the first many connections that end together. These lie far apart, and each
    prevents that the memory around it, up to a megabyte, is returned.
    """
    for make in (list, dict, float):
        kept: list[object] = [make() for _ in range(KEPT_MAX)]
        kept.clear()
    for _ in range(KEPT_MAX):
        loop.call_soon(_nothing)


def _nothing() -> None:
    """A callback for the handles."""
