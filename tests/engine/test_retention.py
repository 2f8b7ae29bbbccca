"""Floors: each byte that anybody can still ask for is there, each other is given back, through any history of forks."""

from __future__ import annotations

import pytest

from headwater.core.rules import CreateRequest, ForkRequest
from tests.engine.retention_world import BUCKET, Expected, World

STEPS = 120


@pytest.mark.parametrize("seed", range(25))
def test_floors_hold_through_any_history(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.settle()
    world.check()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(25, 1025))
def test_floors_hold_through_many_histories(seed: int) -> None:
    test_floors_hold_through_any_history(seed)


def test_a_thousand_forks_that_go_away_take_no_time() -> None:
    world = World(0)
    world.create()
    source = world.streams[0]
    for _ in range(10):
        world.append()
    world.settle()
    forks = []
    for _ in range(3000):
        fork = Expected(world.fresh_name(), source.messages[:5], 5, 0, source)
        request = ForkRequest(source.name, str(source.offset(5)), 0)
        world.engine.buckets.create_stream(
            BUCKET, CreateRequest(fork.name, None, None, None, False, b"", request), world.must_work
        )
        forks.append(fork)
    world.settle()
    upload = world.engine.snapshots.upload()
    upload.write(b"state")
    world.engine.snapshots.publish(source.name, str(source.offset(10)), "a/b", upload, world.must_work)
    world.settle()
    found = world.engine.look_up(source.name)
    for fork in forks[:-1]:
        world.engine.delete(fork.name, world.must_work)
    world.settle()
    assert found.floor_index == 0
    world.engine.delete(forks[-1].name, world.must_work)
    world.settle()
    assert found.floor_index == 10
    assert world.storage.usage().payload_bytes == 0
