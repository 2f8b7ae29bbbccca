"""Reading a lake: the files of its latest version, of either form, for Spark or anybody else who reads Parquet.

Invariant: what is read is one version, whole. Files that a half-done batch left behind are never among it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwater.pipeline.archive.files import COLUMNS, shard_of
from headwater.pipeline.archive.manifest import Archived, LakeTrouble, Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import DataFrame, SparkSession


def is_delta(lake: Path) -> bool:
    return (lake / "_delta_log").is_dir()


def files_of(lake: Path, stream: str = "") -> list[str]:
    """Paths of the files; of one stream, only those that may have it."""
    if is_delta(lake):
        from headwater.pipeline.archive.delta import DeltaLake  # noqa: PLC0415 - only where it is needed

        table = DeltaLake(lake)
        found, shards = table.files(), table.shards()
    else:
        manifest = Manifest(lake)
        if not manifest.exists:
            raise LakeTrouble(f"{lake} is not a lake: it has neither a manifest nor a Delta log.")
        contents = manifest.contents()
        found, shards = [str(lake / file) for file in contents.files], contents.shards
    if stream and shards:
        wanted = f"/shard={shard_of(stream, shards)}/"
        found = [path for path in found if wanted in path]
    return found


def frame_of(spark: SparkSession, lake: Path, stream: str = "") -> DataFrame:
    """A lake as rows, with `date` and `shard` as columns."""
    lake = lake.absolute()
    found = files_of(lake, stream)
    if not found:
        return spark.createDataFrame([], f"{COLUMNS}, date date, shard int")
    root = lake if is_delta(lake) else lake / "data"
    rows = spark.read.option("basePath", str(root)).schema(f"{COLUMNS}, date date, shard int").parquet(*found)
    return rows.where(rows["stream"] == stream) if stream else rows


def archived(lake: Path, streams: Iterable[str] = ()) -> dict[str, Archived]:
    """Up to which offset each stream is in the lake. A Delta log must be asked for each by name."""
    if is_delta(lake):
        from headwater.pipeline.archive.delta import DeltaLake  # noqa: PLC0415

        return DeltaLake(lake).archived(streams)
    return Manifest(lake).contents().streams
