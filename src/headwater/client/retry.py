"""Retry decisions: whether to retry a failed request, and after how long. No clock, no I/O.

A request that is not idempotent is retried only if the server certainly did not process it: the connection could not
be established, or the response was 429.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from headwater.client.errors import ClientError


@dataclass(frozen=True, slots=True)
class Retry:
    """How long and how often a failing request is retried."""

    timeout_s: float | None = 30.0
    """Give up this long after the first attempt; None never gives up."""
    attempts: int | None = None
    """Give up after this many attempts; None means no limit."""
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0

    def delay_s(self, error: ClientError, *, failures: int, elapsed_s: float, idempotent: bool) -> float | None:
        """How long to wait before the next attempt; None if there is none.

        `failures` counts consecutive failed attempts, including this one; `elapsed_s` is the time since the first.
        """
        if not (error.was_not_processed or (idempotent and error.is_transient)):
            return None
        if self.attempts is not None and failures >= self.attempts:
            return None
        backoff_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, 16))
        delay_s = max(error.retry_after_s, backoff_s * random.uniform(0.5, 1.0))
        if self.timeout_s is not None and elapsed_s + delay_s > self.timeout_s:
            return None
        return delay_s


DEFAULT_RETRY: Final = Retry()
ENDLESS_RETRY: Final = Retry(timeout_s=None)
NO_RETRY: Final = Retry(attempts=1)
