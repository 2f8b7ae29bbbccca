"""Crashes of the simulated disk, seed by seed: what was acknowledged is there, whole, in order and once."""

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
    recoveries = run_seeds(range(1000, 4000) if long else range(1000, 1025))
    assert recoveries >= (21_000 if long else 175), "too few recoveries to mean anything"


def test_segments_of_32_kib(long: bool) -> None:
    """Longer lives, so that segments roll and packs are merged at a more usual size."""
    run_seeds(range(9000, 9300) if long else range(9000, 9006), generations=4, steps=200, settings=LARGER)


def test_recovery_of_a_recovery_for_many_generations(long: bool) -> None:
    run_seeds(range(5000, 5200) if long else range(5000, 5005), generations=16, steps=25)


def test_file_fast_survives_the_death_of_the_process(long: bool) -> None:
    run_seeds(range(6000, 7000) if long else range(6000, 6020), durable=False, power=False)


def test_a_directory_changes_between_the_two_modes(long: bool) -> None:
    """What `file-fast` leaves behind becomes durable when `file-durable` takes over."""
    for seed in range(7000, 7300) if long else range(7000, 7010):
        simulation = Simulation(seed, durable=False, power=False)
        simulation.run(generations=2)
        simulation.become(durable=True, power=True)
        simulation.run(generations=3)
        simulation.become(durable=False, power=False)
        simulation.run(generations=2)


def test_file_fast_after_a_power_loss_has_a_past_of_each_stream(long: bool) -> None:
    """No promise was made, but it starts, and no stream holds anything that was never written to it."""
    for seed in range(8000, 9000) if long else range(8000, 8020):
        simulation = Simulation(seed, durable=False)
        simulation.run_without_promise(generations=4)
