"""Counters and histograms of the engine, as plain numbers.

Incrementing a `prometheus_client` counter takes about a microsecond, a plain addition a twentieth of that; so the hot
path adds to these, and the metrics page reads them on request.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BATCH_SIZE_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
COMMIT_SECONDS_BOUNDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

REQUEST_SECONDS_BOUNDS: Final = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_FIRST_BOUND_S: Final = REQUEST_SECONDS_BOUNDS[0]
LOOP_LAG_SECONDS_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram:
    """Counts per bucket, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Buckets in the form of Prometheus: upper bound, and the number of values at or below it."""
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(seen)))
        return buckets


class Metrics:
    __slots__ = (
        "append_bytes",
        "appended_messages",
        "appends",
        "batch_sizes",
        "commit_seconds",
        "created",
        "deleted",
        "deliveries",
        "delivery_lag_seconds",
        "duplicates",
        "evicted_producers",
        "expired",
        "followers",
        "leases_expired",
        "loop_lag_seconds",
        "read_bytes",
        "request_seconds",
        "requests",
        "slow_followers",
        "standby_reads",
        "wakes",
    )

    def __init__(self) -> None:
        self.appends = 0
        self.duplicates = 0
        self.appended_messages = 0
        self.append_bytes = 0
        self.read_bytes = 0
        self.created = 0
        self.deleted = 0
        self.expired = 0
        self.evicted_producers = 0
        self.slow_followers = 0
        self.standby_reads = 0
        self.followers: dict[str, int] = {"sse": 0, "long-poll": 0, "many": 0}
        self.wakes: dict[str, int] = {"webhook": 0, "pull-wake": 0}
        self.deliveries: dict[str, int] = {"accepted": 0, "failed": 0}
        self.leases_expired = 0
        self.requests: dict[tuple[str, int], int] = {}
        self.request_seconds: dict[str, Histogram] = {}
        """By operation."""
        self.batch_sizes = Histogram(BATCH_SIZE_BOUNDS)
        self.commit_seconds = Histogram(COMMIT_SECONDS_BOUNDS)
        self.loop_lag_seconds = Histogram(LOOP_LAG_SECONDS_BOUNDS)
        self.delivery_lag_seconds = Histogram(LOOP_LAG_SECONDS_BOUNDS)

    def count_request(self, operation: str, status: int, seconds: float) -> None:
        """Count a completed request, and the time that it took."""
        try:
            self.requests[operation, status] += 1
            histogram = self.request_seconds[operation]
        except KeyError:
            self.requests.setdefault((operation, status), 1)
            histogram = self.request_seconds.setdefault(operation, Histogram(REQUEST_SECONDS_BOUNDS))
        # `observe` inlined: this runs for every request.
        bucket = bisect_left(REQUEST_SECONDS_BOUNDS, seconds) if seconds > _FIRST_BOUND_S else 0
        histogram.counts[bucket] += 1
        histogram.total += seconds
