"""The append, read and fan-out paths need no more calls than before: a measure of cost that noise does not change."""

from __future__ import annotations

import json

import pytest
from bench import calls

LIMITS = json.loads(calls.LIMITS.read_text())
SLACK = 1.1
"""Timers of the engine may fire while calls are counted, and Python versions differ a little."""


@pytest.mark.parametrize("operation", calls.OPERATIONS)
def test_operation_needs_no_more_calls_than_its_limit(operation: str) -> None:
    counted = calls.measure(operation)
    limit = LIMITS[operation] * SLACK + 1
    assert counted <= limit, f"{operation} takes {counted} calls; if that is right, run python -m bench.calls --write"
    assert counted > LIMITS[operation] / 2, "the limit is far too high: run python -m bench.calls --write"


def test_counter_sees_an_added_call() -> None:
    """The check must be able to fail: one more function on the path is one more call."""
    counter = calls.Counter()
    counter.start()
    len("x")
    counter.stop()
    first = counter.calls
    counter.start()
    len("x")
    len("y")
    counter.stop()
    assert counter.calls - first == first + 1
