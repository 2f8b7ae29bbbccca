"""The settings of the interpreter keep garbage collections and waits for other threads short."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from headwater.engine.interpreter import GC_THRESHOLDS, SWITCH_S, keep_responsive


@pytest.fixture(autouse=True)
def _restored_interpreter() -> Iterator[None]:
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(switch_s)
    gc.unfreeze()


def test_no_collection_scans_many_objects_while_a_server_grows() -> None:
    scanned: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            scanned.append(sum(len(gc.get_objects(number)) for number in range(info["generation"] + 1)))

    keep_responsive()
    gc.callbacks.append(count)
    try:
        kept = [[number] for number in range(700_000)]
    finally:
        gc.callbacks.remove(count)
    assert len(kept) == 700_000
    assert len(scanned) > 50
    assert max(scanned) < 6_000, "a collection of 20,000 objects took up to 14 ms of an iteration of the loop"


def test_threads_yield_to_the_event_loop_soon() -> None:
    keep_responsive()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert SWITCH_S <= 0.001
    assert gc.get_threshold() == GC_THRESHOLDS
