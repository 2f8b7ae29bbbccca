"""The metrics of the pipeline follow Prometheus's naming; names of the previous release still work."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headwater.pipeline.status import QueryStatus, StatusMetrics


@pytest.fixture
def page() -> str:
    registry = CollectorRegistry()
    metrics = StatusMetrics(registry)
    metrics.failures.labels("events").inc()
    status = QueryStatus("events", status="running", rows=70, batch_ms=1500.0, lag_messages=3, restarts=2)
    metrics.set([status], {"slot": {"lag_bytes": 9}})
    return generate_latest(registry).decode()


def test_times_are_seconds_and_counters_end_in_total(page: str) -> None:
    current = {
        name: kind for name, kind in re.findall(r"# TYPE (\S+) (\w+)", page) if f"# HELP {name} Depr" not in page
    }
    current = {name: kind for name, kind in current.items() if not name.endswith("_created")}
    assert len(current) == 9
    for name, kind in current.items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"milliseconds|_ms\b|_kb\b|minutes", name), name
    for line in (
        'headwater_pipeline_rows_total{job="events"} 70.0',
        'headwater_pipeline_batch_seconds{job="events"} 1.5',
        'headwater_pipeline_restarts_total{job="events"} 2.0',
    ):
        assert f"{line}\n" in page


def test_help_of_old_names_refers_to_the_new_ones(page: str) -> None:
    for line in (
        'headwater_pipeline_rows{job="events"} 70.0',
        'headwater_pipeline_batch_milliseconds{job="events"} 1500.0',
        'headwater_pipeline_restarts{job="events"} 2.0',
        "# HELP headwater_pipeline_batch_milliseconds Deprecated: use headwater_pipeline_batch_seconds.",
    ):
        assert f"{line}\n" in page
