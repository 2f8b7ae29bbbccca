"""Check the checker: the model test must fail for every engine with a deliberate fault."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.broken import BROKEN
from tests.model.machine import machine

CHECKERS = Path(__file__).parents[1]
RARE = frozenset(
    (
        "continues after a failed write",
        "does not cascade",
        "does not extend the TTL on reads",
        "reopens closed streams after a restart",
        "shows what is not durable",
    )
)
"""Faults that only a long search finds."""

SEARCH = settings(
    max_examples=600,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def failing_file(error: BaseException) -> Path:
    """The file whose assertion failed."""
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.long if fault in RARE else ()) for fault in BROKEN]
)
def test_faulty_engine_is_detected(fault: str) -> None:
    broken = BROKEN[fault]
    try:
        with broken.patched():
            run_state_machine_as_test(machine(broken.backing, broken.commit, broken.engine), settings=SEARCH)
    except Exception as error:
        where = failing_file(error)
        checked = isinstance(error, AssertionError) and where.is_relative_to(CHECKERS)
        if not checked and not broken.may_crash:
            raise
        return
    pytest.fail(f"the model test does not detect an engine that {fault}")
