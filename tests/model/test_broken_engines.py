"""The checker is checked: every engine that is wrong on purpose makes the model test fail."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.broken import BROKEN
from tests.model.machine import machine

CHECKERS = Path(__file__).parents[1]

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


def noticed_by(error: BaseException) -> Path:
    """The file whose assertion failed."""
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename)


@pytest.mark.parametrize("way", BROKEN)
def test_an_engine_that_is_wrong_is_found_out(way: str) -> None:
    broken = BROKEN[way]
    try:
        with broken.bent():
            run_state_machine_as_test(machine(broken.ground, broken.commit, broken.engine), settings=SEARCH)
    except Exception as error:
        where = noticed_by(error)
        checked = isinstance(error, AssertionError) and where.is_relative_to(CHECKERS)
        if not checked and not broken.trips_itself:
            raise
        return
    pytest.fail(f"the model test does not notice an engine that {way}")
