"""Where Spark finds `format("headwater")`: it looks for top-level modules `pyspark_*` with a `DefaultSource`."""

from __future__ import annotations

from headwater.spark.source import HeadwaterSource as DefaultSource

__all__ = ["DefaultSource"]
