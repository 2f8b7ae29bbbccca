"""Arranging rows before the sink, so that one task writes each target. In which order is for `orderBy` to say.

Spark sorts no streaming rows by itself, so the sink does: within a task it has all rows of its targets.
"""

from __future__ import annotations

from pyspark.sql import DataFrame


def by_target(df: DataFrame, *, partitions: int, stream_column: str = "stream") -> DataFrame:
    """All rows of a target in one task.

    The number of partitions is part of what makes a retry the same: keep it for as long as the checkpoint lives.
    """
    return df.repartition(partitions, stream_column)
