"""Prometheus metrics as OpenTelemetry's data: the same names (counters without `_total`), labels as attributes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Final

import prometheus_client
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

_UNITS: Final = {"seconds": "s", "bytes": "By"}


def metrics_data(
    families: Iterable[prometheus_client.Metric], resource: Resource, scope: str, began_ns: int
) -> MetricsData:
    """All families as cumulative values since `began_ns`."""
    now_ns = time.time_ns()
    metrics = [
        Metric(_name(family), family.documentation, _unit(family.name), _data(family, began_ns, now_ns))
        for family in families
        # A deprecated name would be a second metric with the same content.
        if family.samples and not family.documentation.startswith("Deprecated")
    ]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(InstrumentationScope(scope), metrics, "")], "")])


def _name(family: prometheus_client.Metric) -> str:
    return f"{family.name}_info" if family.type == "info" else family.name


def _unit(name: str) -> str:
    return _UNITS.get(name.rpartition("_")[2], "1")


def _data(family: prometheus_client.Metric, began_ns: int, now_ns: int) -> Sum | Gauge | Histogram:
    cumulative = AggregationTemporality.CUMULATIVE
    if family.type == "histogram":
        return Histogram(_histogram_points(family, began_ns, now_ns), cumulative)
    points = [
        NumberDataPoint(dict(sample.labels), began_ns, now_ns, sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return Sum(points, cumulative, is_monotonic=True) if family.type == "counter" else Gauge(points)


def _histogram_points(family: prometheus_client.Metric, began_ns: int, now_ns: int) -> list[HistogramDataPoint]:
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        if sample.name.endswith("_bucket"):
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    points = []
    for labels, counts in buckets.items():
        counts.sort()
        # Prometheus counts what is below each bound; OpenTelemetry what is between two.
        between = [int(count - before) for (_, count), (_, before) in zip(counts, [(0.0, 0.0), *counts], strict=False)]
        bounds = [bound for bound, _ in counts if not math.isinf(bound)]
        total = int(counts[-1][1])
        points.append(
            HistogramDataPoint(
                dict(labels),
                began_ns,
                now_ns,
                total,
                sums.get(labels, 0.0),
                between,
                bounds,
                None,  # type: ignore[arg-type]  # The smallest and largest value are optional in OTLP, and not known.
                None,  # type: ignore[arg-type]
            )
        )
    return points
