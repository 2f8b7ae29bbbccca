"""Crashes on the simulated disk: acknowledged records are present, complete, in order and once."""

from __future__ import annotations

from headwater.storage.journaled_store import StoreSettings
from tests.storage.simulation import Simulation, run_seeds

LARGER = StoreSettings(
    segment_bytes=32 * 1024,
    hot_tail_bytes=48 * 1024,
    reserve_bytes=0,
    big_bytes=8 * 1024,
    fanout=3,
    open_packs_max=3,
    manifest_floor_bytes=8 * 1024,
)


def test_an_acknowledged_write_survives_power_losses_and_kills(long: bool) -> None:
    recoveries = run_seeds(range(1000, 4000) if long else range(1000, 1010))
    assert recoveries >= (21_000 if long else 70), "too few recoveries for a meaningful test"


def test_acknowledged_writes_survive_crashes_with_segments_of_32_kib(long: bool) -> None:
    """Longer runs, so that new segments start and packs are merged at a more usual size."""
    run_seeds(range(9000, 9300) if long else range(9000, 9003), generations=4, steps=200, settings=LARGER)


def test_acknowledged_writes_survive_repeated_interrupted_recoveries(long: bool) -> None:
    run_seeds(range(5000, 5200) if long else range(5000, 5002), generations=16, steps=25)


def test_file_fast_survives_the_death_of_the_process(long: bool) -> None:
    run_seeds(range(6000, 7000) if long else range(6000, 6008), durable=False, power=False)


def test_directory_can_change_between_the_two_file_modes(long: bool) -> None:
    """Data written by `file-fast` becomes durable when `file-durable` opens the directory."""
    for seed in range(7000, 7300) if long else range(7000, 7004):
        simulation = Simulation(seed, durable=False, power=False)
        simulation.run(generations=2)
        simulation.become(durable=True, power=True)
        simulation.run(generations=3)
        simulation.become(durable=False, power=False)
        simulation.run(generations=2)


def test_file_fast_recovers_an_earlier_state_of_each_stream_after_a_power_loss(long: bool) -> None:
    """Nothing was guaranteed, but it starts, and no stream contains data that was never written to it."""
    for seed in range(8000, 9000) if long else range(8000, 8008):
        simulation = Simulation(seed, durable=False)
        simulation.run_without_durability(generations=4)
