"""Kills at any time, in every direction: everything that was written arrives once and in order.

The normal run kills a few processes around the two directions that involve a database. `make test-long` makes
`HEADWATER_KILLS` kills (300) in all directions; a failure message contains the seed, and `HEADWATER_KILL_SEED` sets it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.kills.services import services
from tests.kills.trial import Trial, run_kills

QUICK = ("databases", "servers", "workers")


@pytest.mark.timeout(1800)
def test_tables_and_streams_have_exactly_what_was_written(tmp_path: Path) -> None:
    with services(tmp_path / "server") as running:
        trial = Trial(tmp_path, running, random.Random(7), ("stream to Postgres", "Postgres to stream"))
        try:
            trial.round(QUICK)
            trial.finish(str(trial.counts))
        finally:
            trial.close()
    assert trial.counts["messages"] > 0


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_every_direction_is_complete_and_in_order_after_kills_suspensions_and_restores(tmp_path: Path) -> None:
    kills = int(os.environ.get("HEADWATER_KILLS", "300"))
    seed = int(os.environ.get("HEADWATER_KILL_SEED", str(random.randrange(2**32))))
    counts = run_kills(tmp_path, kills, seed)
    assert counts["kills"] >= kills
