"""From ranges of streams to tasks: large ranges are split, small ones share a task.

Invariant: every span of the plan is in exactly one task, and the spans of one stream keep their order over the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import InputPartition

from headwater.spark.offsets import Place, SplitPlan
from headwater.spark.protocol import Chunk

OPEN_COST_BYTES: Final = 256 * 1024
"""What a request costs, in bytes that could be read meanwhile: so a task gets no more than a few dozen streams."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of one stream, to be read by one task."""

    stream: str
    start: Place
    end: Place
    bytes: int
    bounded: bool
    """Whether the server can bound the read; else messages are counted."""
    inline: Chunk | None = None
    """The data itself, where the driver had to read it anyway and it is small."""
    snapshot: str | None = None
    """Not a range, but the snapshot at this offset."""


class Task(InputPartition):
    """What one Spark task reads."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        super().__init__(None)
        self.spans = spans

    def __repr__(self) -> str:
        return f"Task({len(self.spans)} spans, {sum(span.bytes for span in self.spans)} bytes)"


def into_tasks(spans: Iterable[Span], plan: SplitPlan, split: Callable[[Span, int], list[Span]]) -> list[Task]:
    """`split(span, parts)` asks the server for message boundaries."""
    wanted = list(spans)
    if not wanted:
        return []
    cost = sum(_cost(span) for span in wanted)
    limit = max(1, min(plan.split_bytes, cost // plan.tasks_min if plan.tasks_min else plan.split_bytes))
    tasks: list[Task] = []
    filling: list[Span] = []
    filled = 0
    for span in wanted:
        parts = -(-span.bytes // limit)
        if parts > 1:
            # Cores come in even numbers: with an odd number of parts one of them would idle in the last round.
            parts += parts % 2
        pieces = split(span, parts) if parts > 1 and span.bounded and span.snapshot is None else [span]
        for piece in pieces:
            if filling and filled + _cost(piece) > limit + OPEN_COST_BYTES:
                tasks.append(Task(tuple(filling)))
                filling, filled = [], 0
            filling.append(piece)
            filled += _cost(piece)
    tasks.append(Task(tuple(filling)))
    return tasks


def _cost(span: Span) -> int:
    return span.bytes + OPEN_COST_BYTES
