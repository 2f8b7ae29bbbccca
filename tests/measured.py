"""Measuring time on a machine that other programs use too: the one place where tests repeat a measurement.

What the code does itself appears in every measurement; what the machine adds to one of them does not. So the least of
several measurements is the cost of the code, also where the system counts stolen time as time of the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ATTEMPTS = 5


def least(measure: Callable[[], float], limit: float) -> float:
    """Return the least of several measurements; one that is below the limit ends them."""
    found = measure()
    for _ in range(ATTEMPTS - 1):
        if found < limit:
            break
        found = min(found, measure())
    return found


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU time that this thread spends on `work`."""
    began = time.thread_time()
    work()
    return time.thread_time() - began
