"""The loop lag meter shows stalls of the event loop and little else."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from headwater.engine.loop_lag import LoopLag
from headwater.engine.metrics import LOOP_LAG_SECONDS_BOUNDS, Histogram
from tests.waiting import async_wait_until


async def measured(stall_s: float) -> Histogram:
    seconds = Histogram(LOOP_LAG_SECONDS_BOUNDS)
    meter = LoopLag(seconds)
    meter.start(asyncio.get_running_loop())
    await async_wait_until(lambda: sum(seconds.counts) >= 2)
    if stall_s:
        time.sleep(stall_s)  # noqa: ASYNC251 - the stall that the meter must show
    before = sum(seconds.counts)
    await async_wait_until(lambda: sum(seconds.counts) >= before + 2)
    meter.stop()
    return seconds


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_stall_is_in_the_histogram(new_loop: type[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        stalled = runner.run(measured(0.5))
    over = sum(count for bound, count in zip((*stalled.bounds, 999.0), stalled.counts, strict=True) if bound > 0.25)
    assert over >= 1, stalled.cumulative()
    assert stalled.total > 0.2


def test_stopped_meter_records_nothing() -> None:
    async def count() -> tuple[int, int]:
        seconds = await measured(0.0)
        before = sum(seconds.counts)
        await measured(0.0)  # Another meter, whose first timer is later than the next one of the stopped meter.
        return before, sum(seconds.counts)

    before, after = asyncio.run(count())
    assert before == after > 0
