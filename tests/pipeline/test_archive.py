"""Archives: each message once, even if batches are repeated; a Delta table that other tools can read; safe trimming."""

from __future__ import annotations

import datetime as dt
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pydantic import ValidationError
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from headwater.cli import command_line
from headwater.pipeline.archive import migration
from headwater.pipeline.archive.errors import ArchiveError
from headwater.pipeline.archive.files import COLUMNS, ArchivedPosition, ArchiveFile, ArchiveTask, shard_of
from headwater.pipeline.archive.job import Archive
from headwater.pipeline.archive.maintenance import ArchiveMaintenance
from headwater.pipeline.archive.reading import read_archive
from headwater.pipeline.archive.table import ArchiveTable
from headwater.pipeline.archive.transaction_log import TransactionLog
from headwater.pipeline.archive.trimming import POINTER_TYPE
from headwater.pipeline.fold.state import FoldState
from headwater.pipeline.job import JobEnvironment
from tests.pipeline.buckets import Bucket, run

OLD_ARCHIVES = Path(__file__).with_name("old_archives.tar.gz")
"""Written by the code of 7da4165: `parquet` (with a manifest, compacted once) and `delta` (with `date` as text)."""


def batch_of(spark: SparkSession, environment: JobEnvironment, bucket: Bucket) -> DataFrame:
    options = {"url": environment.streams, "bucket": bucket.name, "onGone": "skip"}
    reader = spark.read.format("headwater").schema(COLUMNS).options(**options)
    return reader.load().localCheckpoint()


def held(lake: Path) -> dict[str, list[Any]]:
    """The contents of the archive, read with only `deltalake`."""
    found: dict[str, dict[int, Any]] = {}
    for row in DeltaTable(str(lake)).to_pyarrow_table().to_pylist():
        mine = found.setdefault(row["stream"], {})
        assert row["position"] not in mine, f"{row['stream']} {row['position']} is there twice"
        mine[row["position"]] = json.loads(row["value"])
    return {stream: [rows[position] for position in sorted(rows)] for stream, rows in found.items()}


def test_every_message_is_archived_once(
    spark: SparkSession, bucket: Bucket, environment: JobEnvironment, tmp_path: Path
) -> None:
    lake, began = tmp_path / "lake", dt.datetime.now(dt.UTC).date()
    archive = Archive(lake=lake, bucket=bucket.name, shards=3, streams=("a", "b", "ü"))
    for name in archive.streams:
        bucket.filled(name, [{"s": name, "n": n} for n in range(20)])
    run(spark, archive, environment)
    for name in ("a", "ü"):
        bucket.append(name, [{"s": name, "n": n} for n in range(20, 25)])
    # A query that lost its checkpoint continues where the archive ends.
    run(spark, archive, JobEnvironment(environment.streams, str(tmp_path / "lost")))
    expected = {name: [{"s": name, "n": n} for n in range(25 if name != "b" else 20)] for name in archive.streams}
    assert held(lake) == expected
    table = ArchiveTable(lake)
    assert {name: end.offset for name, end in table.positions().items()} == {
        name: bucket.tail(name) for name in archive.streams
    }
    # The same batch again, and the same messages from another query.
    batch = batch_of(spark, environment, bucket)
    assert archive.run(table, batch, "another", 0) == 0
    assert archive.run(table, batch, "another", 0) == 0
    assert held(lake) == expected
    (row,) = read_archive(spark, lake, "ü").selectExpr("count(*)", "max(position)", "max(shard)", "max(date)").collect()
    assert tuple(row)[:3] == (25, 24, shard_of("ü", 3))
    assert began <= row[3] <= dt.datetime.now(dt.UTC).date()
    before = table.files()
    done = CliRunner().invoke(command_line(), ["archive", "compact", str(lake), "--keep", "0"])
    assert done.exit_code == 0, done.output
    assert len(table.files()) < len(before)
    assert held(lake) == expected
    assert not any(Path(path).exists() for path in set(before) - set(table.files())), "replaced, and not kept"
    assert archive.run(table, batch, "another", 1) == 0, "the positions of streams outlive compaction"
    with pytest.raises(ArchiveError, match="set shards=3"):
        archive.model_copy(update={"shards": 4}).run(table, batch, "third", 0)


def test_archived_messages_are_trimmed_and_bootstrap_returns_the_fold_or_a_pointer(
    spark: SparkSession, bucket: Bucket, environment: JobEnvironment, tmp_path: Path
) -> None:
    events = [{"key": f"k{n % 3}", "operation": "append", "value": f"{n} "} for n in range(12)]
    for name in ("folded", "pointed"):
        bucket.filled(name, events)
    batch = batch_of(spark, environment, bucket)
    archives: list[Archive] = []
    for name, how in (("folded", "fold"), ("pointed", "pointer")):
        lake = tmp_path / name
        archive = Archive(lake=lake, bucket=bucket.name, streams=(name,), trim=how)
        table = archive.table()
        assert archive.trim_streams(table, environment, {}) == 0, "nothing is archived yet"
        archive.run(table, batch.where(batch["stream"] == name), "q", 0)
        assert archive.trim_streams(table, environment, {}) == 1
        assert archive.trim_streams(table, environment, {}) == 0
        assert bucket.snapshot_offset(name) == bucket.tail(name)
        assert bucket.http.get(f"{bucket.root}/{name}", params={"offset": "-1"}).status_code == 410
        assert held(lake) == {name: events}
        archives.append(archive)
    folded = FoldState().apply_all(json.dumps(event).encode() for event in events)
    assert bucket.snapshot("folded") == folded.encoded()
    answer = bucket.http.get(f"{bucket.root}/pointed/snapshot", follow_redirects=True)
    assert answer.headers["Content-Type"] == POINTER_TYPE
    assert answer.json() == {"archive": str(tmp_path / "pointed"), "offset": bucket.tail("pointed"), "messages": 12}
    archive, table = archives[1], archives[1].table()
    late = archive.model_copy(update={"trim_after_s": 3600.0})
    bucket.append("pointed", events)
    archive.run(table, batch_of(spark, environment, bucket).where("stream = 'pointed'"), "q", 1)
    assert late.trim_streams(table, environment, {}) == 0, "it was archived less than an hour ago"
    assert archive.trim_streams(table, environment, {}) == 1


# -- the table and its files, without Spark ----------------------------------------------------------------------------

OLD, NEW = "00000000000000aa", "ff000000000000bb"


def rows_of(incarnation: str, count: int, first: int = 0, stream: str = "s") -> pa.RecordBatch:
    """Messages of one size, with the columns that a task receives."""
    suffix = f"_{incarnation}" if incarnation else ""
    numbers = range(first, first + count)
    return pa.RecordBatch.from_pydict(
        {
            "stream": [stream] * count,
            "position": pa.array(numbers, pa.int64()),
            "offset": [f"{n + 1:016x}_{n + 1:016x}{suffix}" for n in numbers],
            "value": [json.dumps(f"{incarnation} {n}").encode() for n in numbers],
            "content_type": ["application/json"] * count,
            "snapshot": [False] * count,
            "shard": pa.array([0] * count, pa.int32()),
        }
    )


def archive_rows(lake: Path, rows: pa.RecordBatch, batch: int, date: str = "2026-11-16") -> int:
    """Archive rows as a batch of the job does; return how many were new."""
    table = ArchiveTable(lake)
    known = table.positions()
    (written,) = ArchiveTask(str(lake), date, f"q-{batch}", known)(iter([rows]))
    files = [msgspec.json.decode(file, type=ArchiveFile) for file in written["file"].to_pylist() if file is not None]
    ends = msgspec.json.decode(written["streams"].to_pylist()[-1], type=dict[str, ArchivedPosition])
    table.commit({"q": batch}, files, ends, 1, known)
    return sum(file.rows for file in files)


def test_a_recreated_stream_is_archived_from_its_beginning(tmp_path: Path) -> None:
    assert archive_rows(tmp_path, rows_of(OLD, 100), 0) == 100
    assert archive_rows(tmp_path, rows_of(OLD, 100), 1) == 0
    assert archive_rows(tmp_path, rows_of(NEW, 50), 2) == 50
    assert ArchiveTable(tmp_path).positions()["s"] == ArchivedPosition(f"{50:016x}_{50:016x}_{NEW}", 50)
    assert archive_rows(tmp_path, rows_of(NEW, 60), 3) == 10
    assert ArchiveTable(tmp_path).compact() == (3, 1)
    (path,) = ArchiveTable(tmp_path).files()
    found = [json.loads(value) for value in pq.ParquetFile(path).read()["value"].to_pylist()]
    assert sorted(found) == sorted([f"{OLD} {n}" for n in range(100)] + [f"{NEW} {n}" for n in range(60)])


def test_an_archive_from_before_incarnations_continues_where_it_ends(tmp_path: Path) -> None:
    assert archive_rows(tmp_path, rows_of("", 20), 0) == 20
    assert archive_rows(tmp_path, rows_of(OLD, 30), 1) == 10
    assert ArchiveTable(tmp_path).positions()["s"].offset.endswith(OLD)


def test_other_tools_read_each_row_once_before_and_after_compaction(tmp_path: Path) -> None:
    import duckdb
    import polars as pl

    for batch in range(3):
        archive_rows(tmp_path, rows_of(OLD, 5, batch * 5, stream="a"), batch * 2, f"2026-11-{14 + batch}")
        archive_rows(tmp_path, rows_of(OLD, 5, batch * 5, stream="b"), batch * 2 + 1, f"2026-11-{14 + batch}")
    for _ in range(2):
        table = DeltaTable(str(tmp_path))
        dataset = table.to_pyarrow_dataset()
        first = pyarrow.dataset.field("date") == dt.date(2026, 11, 14)
        assert (dataset.count_rows(), dataset.count_rows(filter=first)) == (30, 10)
        assert dataset.schema.field("date").type == pa.date32()
        frame = table.to_pandas()
        assert (len(frame), frame.groupby("stream")["position"].nunique().to_dict()) == (30, {"a": 15, "b": 15})
        by_day = "SELECT date, count(*) FROM dataset WHERE stream = 'a' GROUP BY date ORDER BY date"
        assert duckdb.execute(by_day).fetchall() == [(dt.date(2026, 11, 14 + n), 5) for n in range(3)]
        lazy = pl.scan_pyarrow_dataset(dataset).filter(pl.col("date") == dt.date(2026, 11, 15))
        assert lazy.collect()["position"].sort().to_list() == sorted([*range(5, 10), *range(5, 10)])
        ArchiveTable(tmp_path).compact()
    assert len(ArchiveTable(tmp_path).files()) == 3


def test_show_lists_every_stream_with_its_offset(tmp_path: Path) -> None:
    archive_rows(tmp_path, rows_of(OLD, 7, stream="a"), 0)
    archive_rows(tmp_path, rows_of("", 3, stream="b"), 1)
    shown = CliRunner().invoke(command_line(), ["archive", "show", str(tmp_path), "--json"])
    assert [json.loads(line) for line in shown.output.splitlines()] == [
        {"stream": "a", "offset": f"{7:016x}_{7:016x}_{OLD}", "messages": 7},
        {"stream": "b", "offset": f"{3:016x}_{3:016x}", "messages": 3},
    ]
    shown = CliRunner().invoke(command_line(), ["archive", "show", str(tmp_path)])
    assert "version 1: 2 streams, 10 rows, 2 files" in shown.output


def test_concurrent_archives_of_one_stream_are_an_error(tmp_path: Path) -> None:
    archive_rows(tmp_path, rows_of(OLD, 7), 0)
    late = ArchiveTable(tmp_path)
    known = late.positions()
    archive_rows(tmp_path, rows_of(OLD, 9), 1)
    with pytest.raises(ArchiveError, match="another archive job is writing the same streams"):
        late.commit({"other": 0}, [], {"s": ArchivedPosition(f"{9:016x}_{9:016x}_{OLD}", 9)}, 1, known)


def test_transactions_are_the_same_with_checkpoints_and_cleaned_up_commits(tmp_path: Path) -> None:
    for batch in range(6):
        archive_rows(tmp_path, rows_of(OLD, batch + 1), batch)
    expected = dict(TransactionLog(tmp_path).advance())
    assert expected["q"] == 5
    follower, behind = TransactionLog(tmp_path), TransactionLog(tmp_path)
    follower.advance()
    behind.advance()
    DeltaTable(str(tmp_path)).create_checkpoint()
    assert follower.advance() == TransactionLog(tmp_path).advance() == expected
    for batch in range(6, 9):
        archive_rows(tmp_path, rows_of(OLD, batch + 1), batch)
    DeltaTable(str(tmp_path)).create_checkpoint()
    for version in range(9):
        (tmp_path / "_delta_log" / f"{version:020d}.json").unlink()
    expected |= {"q": 8, "headwater/messages/s": 9, "headwater/bytes/s": 9}
    assert behind.advance() == TransactionLog(tmp_path).advance() == expected
    for path in (tmp_path / "_delta_log").iterdir():
        path.unlink()
    with pytest.raises(ArchiveError, match="is incomplete"):
        TransactionLog(tmp_path).advance()


def test_transactions_at_an_earlier_time_are_those_of_the_commits_before_it(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    for batch in range(4):
        archive_rows(tmp_path, rows_of(OLD, batch + 1), batch)
        commit = log / f"{batch:020d}.json"
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        actions[0]["commitInfo"]["timestamp"] = (batch + 1) * 1000
        commit.write_text("".join(json.dumps(action) + "\n" for action in actions))
    DeltaTable(str(tmp_path)).create_checkpoint()
    past = TransactionLog(tmp_path)
    assert [past.advance(ms).get("q") for ms in (500, 1500, 2500, 2600, 4000)] == [None, 0, 1, 1, 3]
    assert TransactionLog(tmp_path).advance(2500)["q"] == 1
    assert ArchiveTable(tmp_path).positions(before_ms=2500)["s"].position == 2
    os.utime(log / f"{3:020d}.checkpoint.parquet", (2, 2))
    assert TransactionLog(tmp_path).advance(2500)["q"] == 3, "an old checkpoint is of an old commit"


def test_maintenance_compacts_and_deletes_only_what_no_version_needs(tmp_path: Path) -> None:
    for batch in range(4):
        archive_rows(tmp_path, rows_of(OLD, 10 * (batch + 1)), batch)
    before, replaced = held(tmp_path), ArchiveTable(tmp_path).files()
    leftover = Path(replaced[0]).with_name("left-by-a-killed-task.parquet")
    leftover.write_bytes(b"PAR1")
    os.utime(leftover, (0, 0))
    (tmp_path / "_checkpoints").mkdir()
    (tmp_path / "_checkpoints" / "kept").write_bytes(b"")
    maintenance = ArchiveMaintenance(tmp_path, every_s=1e-9, keep_s=7200.0)
    maintenance.run_if_due()
    maintenance.wait()
    assert len(ArchiveTable(tmp_path).files()) == 1
    assert held(tmp_path) == before
    assert all(Path(path).exists() for path in replaced), "a reader of the previous version still needs them"
    assert not leftover.exists()
    ArchiveMaintenance(tmp_path, every_s=0.0, keep_s=0.0).run_if_due()
    assert ArchiveTable(tmp_path).vacuum(0) == 4
    assert held(tmp_path) == before
    assert (tmp_path / "_checkpoints" / "kept").exists()


# -- archives of earlier releases --------------------------------------------------------------------------------------

OLD_ROWS = {stream: [{"n": n} for n in range(9)] for stream in ("a", "ü")}


def old_archive(directory: Path, form: str) -> Path:
    with tarfile.open(OLD_ARCHIVES) as packed:
        packed.extractall(directory, filter="data")
    return directory / form


def test_an_archive_with_a_manifest_is_migrated_in_place(spark: SparkSession, tmp_path: Path) -> None:
    lake = old_archive(tmp_path, "parquet")
    refused = CliRunner().invoke(command_line(), ["archive", "show", str(lake)])
    assert f"headwater archive migrate {lake}" in str(refused.exception)
    with pytest.raises(ArchiveError, match="archive migrate"):
        Archive(lake=lake, streams=("a",), shards=2).table()
    files = sorted(lake.rglob("*.parquet"))
    for expected in ("to a Delta table: 2 files, 2 streams", "needs no migration"):
        done = CliRunner().invoke(command_line(), ["archive", "migrate", str(lake)])
        assert done.exit_code == 0, done.output
        assert expected in done.output
    assert sorted(lake.rglob("*.parquet")) == files
    assert held(lake) == OLD_ROWS
    table = ArchiveTable(lake)
    assert table.shards() == 2
    assert table.positions()["ü"] == ArchivedPosition(f"{9:016x}_{27:016x}_7fffffff000000bb", 9)
    assert table.has_batch("5b0f8a52-7b35-4c4e-9d3a-0a1f5f3f9d11", 2)
    assert not table.has_batch("5b0f8a52-7b35-4c4e-9d3a-0a1f5f3f9d11", 3)
    new = rows_of("00000000000000aa", 12, stream="a")
    assert archive_rows(lake, new, 3) == 3
    rows = read_archive(spark, lake).groupBy("date").count().orderBy("date").collect()
    assert [(str(row[0]), row[1]) for row in rows] == [("2026-11-14", 8), ("2026-11-15", 10), ("2026-11-16", 3)]
    table.compact()
    table.vacuum(0)
    assert len(held(lake)["a"]) == 12


def test_a_migration_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    lake = old_archive(tmp_path, "parquet")
    assert CliRunner().invoke(command_line(), ["archive", "migrate", str(lake)]).exit_code == 0
    (lake / "_manifest-before-delta").rename(lake / "_manifest")
    done = CliRunner().invoke(command_line(), ["archive", "migrate", str(lake)])
    assert done.exit_code == 0, done.output
    assert held(lake) == OLD_ROWS


def test_archive_that_is_written_to_during_its_migration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = old_archive(tmp_path, "parquet")
    read, versions = migration._read_manifest, iter((0, 1))

    def read_while_written(manifest: Path) -> Any:
        state = read(manifest)
        state.version += next(versions)
        return state

    monkeypatch.setattr(migration, "_read_manifest", read_while_written)
    with pytest.raises(ArchiveError, match="was written to during the migration; stop its archive and migrate again"):
        migration.migrate(lake)
    assert not (lake / "_delta_log").exists()
    monkeypatch.undo()
    migration.migrate(lake)
    assert held(lake) == OLD_ROWS


def test_a_damaged_manifest_is_not_migrated(tmp_path: Path) -> None:
    lake = old_archive(tmp_path, "parquet")
    (lake / "_manifest" / f"{2:020d}.json").unlink()
    done = CliRunner().invoke(command_line(), ["archive", "migrate", str(lake)])
    assert "commit 2 is missing, but commit 5 exists" in str(done.exception)
    assert not (lake / "_delta_log").exists()


def test_an_old_delta_archive_is_readable_and_gets_a_date_by_migration(spark: SparkSession, tmp_path: Path) -> None:
    lake = old_archive(tmp_path, "delta")
    assert held(lake) == OLD_ROWS
    assert ArchiveTable(lake).positions()["a"].position == 9
    assert archive_rows(lake, rows_of("00000000000000aa", 10, stream="a"), 3) == 1
    done = CliRunner().invoke(command_line(), ["archive", "migrate", str(lake)])
    assert done.exit_code == 0, done.output
    assert DeltaTable(str(lake)).to_pyarrow_dataset().schema.field("date").type == pa.date32()
    assert archive_rows(lake, rows_of("00000000000000aa", 12, stream="a"), 4) == 2
    rows = read_archive(spark, lake).groupBy("date").count().orderBy("date").collect()
    assert [(str(row[0]), row[1]) for row in rows] == [("2026-11-14", 8), ("2026-11-15", 10), ("2026-11-16", 3)]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "name what to read"),
        ({"streams": ("a",), "trim": "fold"}, "only streams of a bucket"),
        ({"bucket": "abcd", "streams": ("a",), "prefix": "b"}, "not both"),
    ],
)
def test_invalid_settings_are_rejected_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Archive(lake=Path("lake"), **settings)


def test_directory_that_is_not_an_archive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="is not an archive"):
        ArchiveTable(tmp_path).files()
