"""The settings of the interpreter keep garbage collections and waits for other threads short."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
import uvloop

from headwater.engine.interpreter import GC_THRESHOLDS, SWITCH_S, keep_responsive


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with closing(uvloop.new_event_loop()) as made:
        yield made


@pytest.fixture(autouse=True)
def _restored_interpreter() -> Iterator[None]:
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(switch_s)
    gc.unfreeze()


def test_no_collection_scans_many_objects_while_a_server_grows(loop: asyncio.AbstractEventLoop) -> None:
    scanned: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            scanned.append(sum(len(gc.get_objects(number)) for number in range(info["generation"] + 1)))

    keep_responsive(loop)
    gc.callbacks.append(count)
    try:
        kept = [[number] for number in range(700_000)]
    finally:
        gc.callbacks.remove(count)
    assert len(kept) == 700_000
    assert len(scanned) > 50
    assert max(scanned) < 6_000, "a collection of 20,000 objects took up to 14 ms of an iteration of the loop"


def test_threads_yield_to_the_event_loop_soon(loop: asyncio.AbstractEventLoop) -> None:
    keep_responsive(loop)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert SWITCH_S <= 0.001
    assert gc.get_threshold() == GC_THRESHOLDS


def test_handles_of_many_callbacks_at_once_are_freed(loop: asyncio.AbstractEventLoop) -> None:
    """The event loop keeps unused ones for reuse. It must keep those of the start, not those of many connections."""
    keep_responsive(loop)
    run_pending(loop)
    before = sys.getallocatedblocks()
    for _ in range(2_000):
        loop.call_soon(list)
    run_pending(loop)
    assert sys.getallocatedblocks() - before < 200


def run_pending(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon(loop.stop)
    loop.run_forever()
