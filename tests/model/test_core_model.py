"""Compare the engine with the model over stores that need no disk."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from headwater.engine.commit_placement import CommitMode
from tests.engine.seams import Backing, JournalBacking, MemoryBacking
from tests.model.machine import machine


@pytest.mark.parametrize(
    ("backing", "commit"),
    [(MemoryBacking, "inline"), (JournalBacking, "inline"), (JournalBacking, "thread")],
    ids=["memory", "disk", "disk-on-a-thread"],
)
def test_engine_always_matches_the_model(backing: Callable[[], Backing], commit: CommitMode, long: bool) -> None:
    run_state_machine_as_test(
        machine(backing, commit),
        settings=settings(
            max_examples=5000 if long else 50,
            # Other examples each time only in the long run, which has the time to find a rare one.
            derandomize=not long,
            stateful_step_count=50,
            deadline=None,
            # The explain phase takes longer than finding a failure.
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
