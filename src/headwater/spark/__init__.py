"""Durable streams in Spark: a source and a sink with exactly-once delivery, and recommended session settings.

`pip install 'headwater[spark]'` on every node is enough: Spark finds `format("headwater")` through the module
`pyspark_headwater`. The package talks to servers over HTTP only. Every Python worker imports this module, so modules
that only a driver needs (`progress`) are not imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.spark.session import conf_lines, configure, recommended_settings, session
from headwater.spark.source import HeadwaterSource
from headwater.spark.upserts import upserts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "HeadwaterSource",
    "by_target",
    "conf_lines",
    "configure",
    "recommended_settings",
    "session",
    "upserts",
]


def by_target(df: DataFrame, *, partitions: int, stream_column: str = "stream") -> DataFrame:
    """Repartition rows so that one task has all rows of a target; the sink then sorts them by `orderBy`."""
    return df.repartition(partitions, stream_column)
