"""Split a range of a stream into runs of about equal size, in slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.engine.cold_reads import ColdRead
from headwater.engine.reading import StreamReader
from headwater.engine.scheduler import Scheduler
from headwater.engine.stream import LiveStream

SLICE_S: Final = 0.005
"""Maximum time of one slice."""

T = TypeVar("T")


def split_range(
    reader: StreamReader,
    scheduler: Scheduler,
    stream: LiveStream,
    start: Offset,
    end: Offset,
    count: int,
    convert: Callable[[Offset, Offset], T],
    done: Callable[[list[T] | Refusal], None],
) -> None:
    """Split the range from `start` to `end` into about `count` runs, and call `done` with the converted runs."""
    share = max(1, -(-(end.byte_position - start.byte_position) // count))
    runs: list[T] = []
    at = start

    def step() -> None:
        nonlocal at
        until_s = scheduler.timer_s() + SLICE_S
        try:
            reader.check_readable(stream, at)
            with reader.deferring():
                while at.message_index < end.message_index:
                    run_end = reader.run(stream, at, end, share).end
                    runs.append(convert(at, run_end))
                    at = run_end
                    if scheduler.timer_s() >= until_s:
                        scheduler.soon(step)
                        return
        except ColdRead as miss:
            miss.when_fetched(scheduler, step_again)
        except Refusal as refusal:
            done(refusal)
        else:
            done(runs)

    def step_again(refusal: Refusal | None) -> None:
        if refusal is None:
            step()
        else:
            done(refusal)

    step()
