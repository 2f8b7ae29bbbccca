"""Group ranges of streams into tasks: large ranges are split, small ones share a task.

Invariant: every span of the plan is in exactly one task, and the spans of one stream keep their order across tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import InputPartition

from headwater.spark.offsets import Place, SplitPlan
from headwater.spark.protocol import Chunk

OPEN_COST_BYTES: Final = 256 * 1024
"""The cost of a request, as bytes that could be read in the same time. It limits a task to a few dozen streams."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of one stream, to be read by one task."""

    stream: str
    start: Place
    end: Place
    bytes: int
    bounded: bool
    """Whether the server can end a read at an offset; otherwise messages are counted."""
    inline: Chunk | None = None
    """The data itself, if it is small and the driver has read it."""
    snapshot: str | None = None
    """If set, the span is not a range but the snapshot at this offset."""


class ReadTask(InputPartition):
    """The input of one Spark task."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        super().__init__(None)
        self.spans = spans

    def __repr__(self) -> str:
        return f"ReadTask({len(self.spans)} spans, {sum(span.bytes for span in self.spans)} bytes)"


def into_tasks(spans: Iterable[Span], plan: SplitPlan, split: Callable[[Span, int], list[Span]]) -> list[ReadTask]:
    """Create tasks. `split(span, parts)` asks the server for message boundaries."""
    wanted = list(spans)
    if not wanted:
        return []
    cost = sum(_cost(span) for span in wanted)
    limit = max(1, min(plan.split_bytes, cost // plan.tasks_min if plan.tasks_min else plan.split_bytes))
    tasks: list[ReadTask] = []
    filling: list[Span] = []
    filled = 0
    for span in wanted:
        parts = -(-span.bytes // limit)
        if parts > 1:
            # Machines have an even number of cores; with an odd number of parts, one core would idle at the end.
            parts += parts % 2
        pieces = split(span, parts) if parts > 1 and span.bounded and span.snapshot is None else [span]
        for piece in pieces:
            if filling and filled + _cost(piece) > limit + OPEN_COST_BYTES:
                tasks.append(ReadTask(tuple(filling)))
                filling, filled = [], 0
            filling.append(piece)
            filled += _cost(piece)
    tasks.append(ReadTask(tuple(filling)))
    return tasks


def _cost(span: Span) -> int:
    return span.bytes + OPEN_COST_BYTES
