"""Arranging rows before the sink, so that one task writes each target, in a stated order."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame


def by_target(df: DataFrame, *order_by: str | Column, partitions: int, stream_column: str = "stream") -> DataFrame:
    """Rows of one target in one task, sorted by `order_by` within it.

    The number of partitions is part of what makes a retry the same: keep it for as long as the checkpoint lives.
    """
    arranged = df.repartition(partitions, stream_column)
    return arranged.sortWithinPartitions(stream_column, *order_by)
