"""Waiting for an event: the one place where tests poll.

Invariant: a wait ends as soon as the event has happened. The limit only says when the test has failed, so it is far
above what a busy machine needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

Value = TypeVar("Value")

LIMIT_S = 90.0
EVERY_S = 0.02


def wait_until(
    look: Callable[[], Value],
    wanted: Callable[[Value], bool] = bool,
    *,
    what: str = "",
    limit_s: float = LIMIT_S,
    every_s: float = EVERY_S,
) -> Value:
    """What `look` returns once that is wanted: true, unless `wanted` says otherwise."""
    deadline = time.monotonic() + limit_s
    while True:
        found = look()
        if wanted(found):
            return found
        assert time.monotonic() < deadline, _failure(found, what, limit_s)
        time.sleep(every_s)


async def async_wait_until(
    look: Callable[[], Value],
    wanted: Callable[[Value], bool] = bool,
    *,
    what: str = "",
    limit_s: float = LIMIT_S,
    every_s: float = 0.005,
) -> Value:
    """The same, in a coroutine."""
    deadline = time.monotonic() + limit_s
    while True:
        found = look()
        if wanted(found):
            return found
        assert time.monotonic() < deadline, _failure(found, what, limit_s)
        await asyncio.sleep(every_s)


async def connections_idle() -> None:
    """Wait until connections within this event loop have transferred all that they can.

    Iterations of the loop are counted, because time can pass without one while the machine is busy.
    """
    for _ in range(50):
        await asyncio.sleep(0.001)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended. One that its parent has not waited for is still listed."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _failure(found: object, what: str, limit_s: float) -> str:
    return f"not within {limit_s:g} s{what and f': {what}'}; the last value is {str(found)[:2000]}"
