"""Cut a range of a stream into runs of about equal size, a slice of the work at a time."""

from __future__ import annotations

import time
from typing import Final

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.engine.cold_reads import ColdRead
from headwater.engine.reading import StreamReader
from headwater.engine.results import OnSplit
from headwater.engine.scheduler import Scheduler
from headwater.engine.stream import LiveStream

SLICE_S: Final = 0.005
"""How long one slice may take."""


def split_range(
    reader: StreamReader,
    scheduler: Scheduler,
    stream: LiveStream,
    start: Offset,
    end: Offset,
    count: int,
    done: OnSplit,
) -> None:
    """Cut the range from `start` to `end` into about `count` runs. `done` gets the end of each."""
    share = max(1, -(-(end.byte_position - start.byte_position) // count))
    ends: list[Offset] = []

    def step() -> None:
        until_s = time.perf_counter() + SLICE_S
        at = ends[-1] if ends else start
        try:
            reader.check_readable(stream, at)
            with reader.deferring():
                while at.message_index < end.message_index:
                    at = reader.run(stream, at, end, share).end
                    ends.append(at)
                    if time.perf_counter() >= until_s:
                        scheduler.soon(step)
                        return
        except ColdRead as miss:
            miss.when_fetched(scheduler, step_again)
        except Refusal as refusal:
            done(refusal)
        else:
            done(ends)

    def step_again(refusal: Refusal | None) -> None:
        if refusal is None:
            step()
        else:
            done(refusal)

    step()
