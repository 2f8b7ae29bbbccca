"""A driver with more open files than select() supports: an error, unless the session was started before."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from headwater.spark.callbacks import SELECT_LIMIT, check_descriptor, start_callback_server
from headwater.spark.errors import TooManyDescriptorsError


@pytest.fixture
def crowded() -> Iterator[int]:
    """Use up all descriptors that select() supports; yields a higher one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), before[1]))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] <= SELECT_LIMIT:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    yield taken[-1]
    for one in taken:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_callback_server_with_a_high_descriptor_is_an_error(crowded: int) -> None:
    with pytest.raises(TooManyDescriptorsError, match=r"headwater\.spark\.session\(\)"):
        check_descriptor(crowded)


def test_batches_arrive_with_many_files_opened_after_the_start(
    spark: SparkSession, crowded: int, tmp_path: Path
) -> None:
    start_callback_server()
    seen: list[int] = []

    def note(batch: DataFrame, number: int) -> None:
        seen.append(number)

    source = tmp_path / "source"
    spark.range(3).coalesce(1).write.parquet(str(source))
    query = (
        spark.readStream.schema("id long")
        .parquet(str(source))
        .writeStream.foreachBatch(note)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert seen == [0]
