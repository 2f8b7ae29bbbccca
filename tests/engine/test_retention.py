"""Floors: after any history of forks, exactly the bytes that can still be read are stored."""

from __future__ import annotations

import pytest

from headwater.core.rules import CreateRequest, ForkRequest
from tests.engine.retention_simulation import BUCKET, Expected, RetentionSimulation

STEPS = 120


@pytest.mark.parametrize("seed", range(25))
def test_floors_hold_through_any_history(seed: int) -> None:
    simulation = RetentionSimulation(seed)
    for _ in range(STEPS):
        simulation.step()
    simulation.run_until_idle()
    simulation.check()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(25, 1025))
def test_floors_hold_through_many_histories(seed: int) -> None:
    test_floors_hold_through_any_history(seed)


def test_deleting_thousands_of_forks_frees_the_source_after_the_last() -> None:
    simulation = RetentionSimulation(0)
    simulation.create()
    source = simulation.streams[0]
    for _ in range(10):
        simulation.append()
    simulation.run_until_idle()
    forks = []
    for _ in range(3000):
        fork = Expected(simulation.fresh_name(), source.messages[:5], 5, 0, source)
        request = ForkRequest(source.name, str(source.offset(5)), 0)
        simulation.engine.buckets.create_stream(
            BUCKET, CreateRequest(fork.name, None, None, None, False, b"", request), simulation.must_work
        )
        forks.append(fork)
    simulation.run_until_idle()
    upload = simulation.engine.snapshots.upload()
    upload.write(b"state")
    simulation.engine.snapshots.publish(source.name, str(source.offset(10)), "a/b", upload, simulation.must_work)
    simulation.run_until_idle()
    found = simulation.engine.look_up(source.name)
    for fork in forks[:-1]:
        simulation.engine.delete(fork.name, simulation.must_work)
    simulation.run_until_idle()
    assert found.floor_index == 0
    simulation.engine.delete(forks[-1].name, simulation.must_work)
    simulation.run_until_idle()
    assert found.floor_index == 10
    assert simulation.storage.usage().payload_bytes == 0
