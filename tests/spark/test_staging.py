"""Staged batches without Spark: one manifest per batch, from the first driver that writes it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from headwater.spark.errors import BatchSupersededError, HeadwaterError
from headwater.spark.staging import INLINE_BYTES_MAX, StagedBatch, staging_root


def rows(*values: int) -> pa.Table:
    return pa.table({"value": [str(value) for value in values]})


def large(value: int) -> pa.Table:
    return pa.table({"value": [str(value) * INLINE_BYTES_MAX]})


def fixed(batch: StagedBatch, *tables: pa.Table) -> list[tuple[str, str]]:
    staged = [batch.put(partition, table) for partition, table in enumerate(tables)]
    return [(part.producer_part, value[:1]) for part in batch.fix(staged) for value in part.rows["value"].to_pylist()]


def test_first_manifest_of_a_batch_wins(tmp_path: Path) -> None:
    first = [("0", "1"), ("0", "2"), ("1", "3"), ("2", "4")]
    assert fixed(StagedBatch(str(tmp_path), "query", 7), rows(1, 2), large(3), rows(4)) == first
    assert fixed(StagedBatch(str(tmp_path), "query", 7), rows(5), rows(6)) == first
    assert fixed(StagedBatch(str(tmp_path), "query", 8), rows(5), rows(6)) == [("0", "5"), ("1", "6")]


def test_a_batch_without_rows_needs_no_files(tmp_path: Path) -> None:
    assert fixed(StagedBatch(str(tmp_path), "query", 0)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_driver_that_was_overtaken_appends_nothing(tmp_path: Path) -> None:
    """It was paused in batch 3; another driver completed batches 3 and 4 and removed the files."""
    late = StagedBatch(str(tmp_path), "query", 3)
    fixed(StagedBatch(str(tmp_path), "query", 4), rows(1))
    with pytest.raises(BatchSupersededError, match="staged batch 4 of the same query"):
        fixed(late, rows(2))


def test_a_missing_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    batch = StagedBatch(str(tmp_path), "query", 0)
    staged = batch.put(0, large(1))
    assert staged.file is not None
    (tmp_path / "query" / "batch-000000000000" / staged.file).unlink()
    with pytest.raises(HeadwaterError, match="Set stagingPath to a directory that the driver and all executors share"):
        list(batch.fix([staged]))


def test_a_batch_staged_by_an_earlier_release_keeps_its_producer_names(tmp_path: Path) -> None:
    batch = StagedBatch(str(tmp_path), "query", 5)
    staged = batch.put(3, large(1))
    manifest = tmp_path / "query" / "batch-000000000005" / "manifest.json"
    manifest.write_text(f'["{staged.file}"]')
    assert fixed(batch, rows(2)) == [("staged-00003", "1")]


@pytest.mark.parametrize(
    ("path", "checkpoint", "root"),
    [
        ("/given", "file:///checkpoint", "/given"),
        ("", "file:///checkpoint/", "file:///checkpoint/headwater"),
        ("", "/checkpoint", "/checkpoint/headwater"),
    ],
)
def test_the_staging_directory_is_inside_the_checkpoint(path: str, checkpoint: str, root: str) -> None:
    assert staging_root(path, checkpoint) == root


def test_file_uris_are_local_paths(tmp_path: Path) -> None:
    fixed(StagedBatch(f"file://{tmp_path}", "query", 0), rows(1))
    fixed(StagedBatch(f"file:{tmp_path}", "a/b", 0), rows(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a%2Fb", "query"]


def test_completed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    first, second = (StagedBatch(str(tmp_path), "query", number) for number in (0, 1))
    fixed(first, large(1))
    fixed(second, rows(2))
    first.remove()
    assert [path.name for path in (tmp_path / "query").iterdir()] == ["batch-000000000001"]
    second.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []
