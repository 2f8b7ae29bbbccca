"""Engine and rules against the model, over stores that need no disk: everything that may happen, in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from headwater.engine.committer import CommitMode
from tests.engine.seams import Ground, JournalGround, MemoryGround
from tests.model.machine import machine


@pytest.mark.parametrize(
    ("ground", "commit"),
    [(MemoryGround, "inline"), (JournalGround, "inline"), (JournalGround, "thread")],
    ids=["memory", "disk", "disk-on-a-thread"],
)
def test_whatever_happens_the_engine_does_what_the_model_says(
    ground: Callable[[], Ground], commit: CommitMode, long: bool
) -> None:
    run_state_machine_as_test(
        machine(ground, commit),
        settings=settings(
            max_examples=5000 if long else 150,
            stateful_step_count=50,
            deadline=None,
            # Explaining a failure takes longer than finding it.
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
