"""An archive as a Spark DataFrame: the files of its latest version."""

from __future__ import annotations

import functools
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.pipeline.archive.files import COLUMNS
from headwater.pipeline.archive.table import ArchiveTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SCHEMA = f"{COLUMNS}, date date, shard int"


def read_archive(spark: SparkSession, lake: Path, stream: str = "") -> DataFrame:
    """The rows of an archive, or of one of its streams, with `date` and `shard` as columns."""
    by_root: dict[str, list[str]] = defaultdict(list)
    for path in ArchiveTable(lake.absolute()).files(stream):
        by_root[path.rpartition("/date=")[0]].append(path)
    if not by_root:
        return spark.createDataFrame([], _SCHEMA)
    # A migrated archive has files under `data/` and beside it; Spark reads partition columns below one base path.
    frames = [
        spark.read.option("basePath", root).schema(_SCHEMA).parquet(*paths) for root, paths in sorted(by_root.items())
    ]
    rows = functools.reduce(lambda one, other: one.union(other), frames)
    return rows.where(rows["stream"] == stream) if stream else rows
