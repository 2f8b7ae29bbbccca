"""Streams in a lake: each message once, whatever is done twice; compacted unnoticed by readers; trimmed when safe."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from headwater.cli import app
from headwater.pipeline.archive.compaction import compact, sweep
from headwater.pipeline.archive.delta import DeltaLake
from headwater.pipeline.archive.files import COLUMNS, SCHEMA, ArchiveTask, ShardWriter, shard_of
from headwater.pipeline.archive.job import Archive
from headwater.pipeline.archive.manifest import CHECKPOINT_EVERY, Archived, File, LakeTrouble, Manifest, Outrun
from headwater.pipeline.archive.reading import archived, files_of, frame_of
from headwater.pipeline.archive.trimming import POINTER_TYPE
from headwater.pipeline.fold.state import State
from headwater.pipeline.job import Surroundings
from tests.pipeline.buckets import Bucket, run


def batch_of(spark: SparkSession, surroundings: Surroundings, bucket: Bucket) -> DataFrame:
    options = {"url": surroundings.streams, "bucket": bucket.name, "onGone": "skip"}
    reader = spark.read.format("headwater").schema(COLUMNS).options(**options)
    return reader.load().localCheckpoint()


def held(lake: Path) -> dict[str, list[Any]]:
    """What the lake has, by its own files and without Spark."""
    found: dict[str, dict[int, Any]] = {}
    for path in files_of(lake):
        for row in pq.ParquetFile(path).read().to_pylist():
            mine = found.setdefault(row["stream"], {})
            assert row["position"] not in mine, f"{row['stream']} {row['position']} is there twice"
            mine[row["position"]] = json.loads(row["value"])
    return {stream: [rows[position] for position in sorted(rows)] for stream, rows in found.items()}


@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_batch_after_batch_the_lake_has_what_the_streams_have_each_once(
    spark: SparkSession, bucket: Bucket, surroundings: Surroundings, tmp_path: Path, form: Any
) -> None:
    lake = tmp_path / "lake"
    archive = Archive(lake=lake, bucket=bucket.name, format=form, shards=3, streams=("a", "b", "ü"))
    for name in archive.streams:
        bucket.filled(name, [{"s": name, "n": n} for n in range(20)])
    run(spark, archive, surroundings)
    for name in ("a", "ü"):
        bucket.append(name, [{"s": name, "n": n} for n in range(20, 25)])
    # A query that lost its checkpoint goes on where the lake ends.
    run(spark, archive, Surroundings(surroundings.streams, str(tmp_path / "lost")))
    expected = {name: [{"s": name, "n": n} for n in range(25 if name != "b" else 20)] for name in archive.streams}
    assert held(lake) == expected
    assert {name: place.offset for name, place in archived(lake, archive.streams).items()} == {
        name: bucket.tail(name) for name in archive.streams
    }
    # The same batch again, and the same messages under another query's name.
    batch = batch_of(spark, surroundings, bucket)
    assert archive.run(batch, "another", 0) == 0
    assert archive.run(batch, "another", 0) == 0
    assert held(lake) == expected
    rows = frame_of(spark, lake, "ü").selectExpr("count(*)", "max(position)", "max(cast(shard as int))").collect()
    assert [tuple(row) for row in rows] == [(25, 24, shard_of("ü", 3))]
    before = files_of(lake)
    done = CliRunner().invoke(app, ["archive", "compact", str(lake), "--keep", "0"])
    assert done.exit_code == 0, done.output
    assert len(files_of(lake)) < len(before)
    assert held(lake) == expected
    assert not any(Path(path).exists() for path in set(before) - set(files_of(lake))), "replaced, and not kept"
    assert archive.run(batch, "another", 1) == 0, "how far each stream is outlives compaction"
    other: Any = {"parquet": "delta", "delta": "parquet"}[form]
    with pytest.raises(LakeTrouble, match="of the other format"):
        archive.model_copy(update={"format": other}).run(batch, "third", 0)
    with pytest.raises(LakeTrouble, match="set shards=3"):
        archive.model_copy(update={"shards": 4}).run(batch, "third", 0)


def test_after_archiving_the_server_may_forget_and_bootstrap_has_the_fold_or_the_way_to_the_lake(
    spark: SparkSession, bucket: Bucket, surroundings: Surroundings, tmp_path: Path
) -> None:
    events = [{"key": f"k{n % 3}", "operation": "append", "value": f"{n} "} for n in range(12)]
    for name in ("folded", "pointed"):
        bucket.filled(name, events)
    batch = batch_of(spark, surroundings, bucket)
    archives = []
    for name, how in (("folded", "fold"), ("pointed", "pointer")):
        lake = tmp_path / name
        archive = Archive(lake=lake, bucket=bucket.name, streams=(name,), trim=how)
        assert archive.let_go(surroundings, {}) == 0, "an empty lake has nothing that is safe"
        archive.run(batch.where(batch["stream"] == name), "q", 0)
        assert archive.let_go(surroundings, {}) == 1
        assert archive.let_go(surroundings, {}) == 0
        assert bucket.snapshot_offset(name) == bucket.tail(name)
        assert bucket.http.get(f"{bucket.root}/{name}", params={"offset": "-1"}).status_code == 410
        assert held(lake) == {name: events}
        archives.append(archive)
    folded = State().apply_all(json.dumps(event).encode() for event in events)
    assert bucket.snapshot("folded") == folded.encoded()
    answer = bucket.http.get(f"{bucket.root}/pointed/snapshot", follow_redirects=True)
    assert answer.headers["Content-Type"] == POINTER_TYPE
    assert answer.json() == {"archive": str(tmp_path / "pointed"), "offset": bucket.tail("pointed"), "messages": 12}
    archive = archives[1]
    late = archive.model_copy(update={"trim_after_s": 3600.0})
    bucket.append("pointed", events)
    archive.run(batch_of(spark, surroundings, bucket).where("stream = 'pointed'"), "q", 1)
    assert late.let_go(surroundings, {}) == 0, "it has not been in the lake for an hour"
    assert archive.let_go(surroundings, {}) == 1


# -- the manifest and its files, without Spark -------------------------------------------------------------------------


def write(lake: Path, manifest: Manifest, stream: str, first: int, count: int, batch: int) -> None:
    writer = ShardWriter(lake, "data", "2026-11-16", shard_of(stream, 2), f"q-{batch}")
    columns = {
        "stream": [stream] * count,
        "position": list(range(first, first + count)),
        "offset": [f"{n + 1:016x}_{n + 1:016x}" for n in range(first, first + count)],
        "value": [json.dumps(n).encode() for n in range(first, first + count)],
        "content_type": ["application/json"] * count,
        "snapshot": [False] * count,
    }
    writer.write(pa.RecordBatch.from_pydict(columns, SCHEMA))
    end = first + count
    place = Archived(f"{end:016x}_{end:016x}", end)
    manifest.commit(
        manifest.contents(), query="q", batch=batch, add=(writer.close(),), streams={stream: place}, shards=2
    )


OLD, NEW = "00000000000000aa", "00000000000000bb"


def rows_of(incarnation: str, count: int, first: int = 0, stream: str = "s") -> pa.RecordBatch:
    """Messages of one size, with the columns that a task gets."""
    suffix = f"_{incarnation}" if incarnation else ""
    numbers = range(first, first + count)
    return pa.RecordBatch.from_pydict(
        {
            "stream": [stream] * count,
            "position": pa.array(numbers, pa.int64()),
            "offset": [f"{n + 1:016x}_{n + 1:016x}{suffix}" for n in numbers],
            "value": [f"{incarnation} {n}".encode() for n in numbers],
            "content_type": ["text/plain"] * count,
            "snapshot": [False] * count,
            "shard": pa.array([0] * count, pa.int32()),
        }
    )


def archive_rows(lake: Path, rows: pa.RecordBatch, batch: int) -> int:
    """As a batch of the job does it; how many rows were new."""
    manifest = Manifest(lake)
    contents = manifest.contents()
    (told,) = ArchiveTask(str(lake), "data", "2026-11-16", 1, f"q-{batch}", contents.streams)(iter([rows]))
    files = [msgspec.json.decode(file, type=File) for file in told["file"].to_pylist() if file is not None]
    places = msgspec.json.decode(told["streams"].to_pylist()[-1], type=dict[str, Archived])
    manifest.commit(contents, query="q", batch=batch, add=files, streams=places, shards=1)
    return sum(file.rows for file in files)


def test_a_stream_that_was_created_again_is_archived_from_its_beginning(tmp_path: Path) -> None:
    assert archive_rows(tmp_path, rows_of(OLD, 100), 0) == 100
    assert archive_rows(tmp_path, rows_of(OLD, 100), 1) == 0
    assert archive_rows(tmp_path, rows_of(NEW, 50), 2) == 50
    assert archived(tmp_path)["s"] == Archived(f"{50:016x}_{50:016x}_{NEW}", 50)
    assert archive_rows(tmp_path, rows_of(NEW, 60), 3) == 10
    compacted = compact(tmp_path)
    assert (compacted.files_before, compacted.files_after, compacted.rows) == (3, 1, 160)
    (path,) = files_of(tmp_path)
    found = [value.decode() for value in pq.ParquetFile(path).read()["value"].to_pylist()]
    assert found == [f"{OLD} {n}" for n in range(100)] + [f"{NEW} {n}" for n in range(60)]


def test_a_lake_from_before_incarnations_goes_on_where_it_ends(tmp_path: Path) -> None:
    assert archive_rows(tmp_path, rows_of("", 20), 0) == 20
    assert archive_rows(tmp_path, rows_of(OLD, 30), 1) == 10
    assert archived(tmp_path)["s"].offset.endswith(OLD)


def test_a_delta_lake_keeps_the_incarnation_of_each_stream(tmp_path: Path) -> None:
    for batch, (incarnation, count) in enumerate([("", 20), (OLD, 30), (NEW, 5)]):
        lake = DeltaLake(tmp_path)
        known = lake.archived(["s"])
        (told,) = ArchiveTask(str(tmp_path), "", "2026-11-16", 1, f"q-{batch}", known)(
            iter([rows_of(incarnation, count)])
        )
        files = [msgspec.json.decode(file, type=File) for file in told["file"].to_pylist() if file is not None]
        assert sum(file.rows for file in files) == {"": 20, OLD: 10, NEW: 5}[incarnation]
        lake.commit("q", batch, files, {"s": Archived(rows_of(incarnation, count)["offset"][-1].as_py(), count)}, 1)
        suffix = f"_{incarnation}" if incarnation else ""
        assert DeltaLake(tmp_path).archived(["s"])["s"] == Archived(f"{count:016x}_{count:016x}{suffix}", count)


def test_a_manifest_reads_the_same_with_checkpoints_and_swept_commits(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    for number in range(CHECKPOINT_EVERY * 2 + 7):
        file = File(f"data/date=d/shard=0/{number}.parquet", "d", 0, 1, 1)
        removed = [f"data/date=d/shard=0/{number - 1}.parquet"] if number % 2 else []
        streams = {f"s{number % 5}": Archived(f"{number:016x}_{number:016x}", number)}
        manifest.commit(manifest.contents(), query="q", batch=number, add=(file,), remove=removed, streams=streams)
    whole = manifest.contents()
    assert (whole.version, whole.batches, len(whole.files)) == (107, {"q": 106}, 54)
    assert whole.streams["s1"].position == 106
    for path in (tmp_path / "_manifest").iterdir():
        os.utime(path, (0, 0))
    (tmp_path / "data").mkdir()
    sweep(tmp_path)
    swept = manifest.contents()
    assert len(list((tmp_path / "_manifest").iterdir())) < 70
    assert (swept.version, swept.files, swept.streams) == (whole.version, whole.files, whole.streams)
    assert swept.batches == whole.batches


def test_of_two_writers_of_a_version_one_is_outrun_and_a_missing_commit_is_noticed(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    first, second = manifest.contents(), manifest.contents()
    manifest.commit(first, query="a", batch=0)
    with pytest.raises(Outrun):
        manifest.commit(second, query="b", batch=0)
    manifest.commit(manifest.contents(), query="b", batch=0)
    assert manifest.contents().batches == {"a": 0, "b": 0}
    assert not [path for path in (tmp_path / "_manifest").iterdir() if path.name.startswith(".")]
    (tmp_path / "_manifest" / f"{1:020d}.json").unlink()
    with pytest.raises(LakeTrouble, match="commit 1 is missing"):
        manifest.contents()


def test_compaction_leaves_the_same_rows_in_fewer_files_and_sweeping_only_what_is_nobodys(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    for batch in range(6):
        write(tmp_path, manifest, "a", batch * 10, 10, batch * 2)
        write(tmp_path, manifest, "b", batch * 5, 5, batch * 2 + 1)
    before, old = held(tmp_path), files_of(tmp_path)
    orphan = Path(old[0]).with_name("half-done.parquet")
    orphan.write_bytes(b"PAR1")
    steps: list[tuple[int, int]] = []
    done = compact(tmp_path, told=lambda at, of: steps.append((at, of)))
    groups = len({shard_of("a", 2), shard_of("b", 2)})
    assert (done.files_before, done.files_after, done.rows) == (12, groups, 90)
    assert steps[-1] == (groups, groups)
    assert held(tmp_path) == before
    assert all(Path(path).exists() for path in old), "a reader of the version before still has its files"
    assert sweep(tmp_path) == 0
    for path in tmp_path.rglob("*.parquet"):
        os.utime(path, (0, 0))
    assert sweep(tmp_path) == 1, "the half-done file is old enough; what was removed just now is not"
    assert not orphan.exists()
    assert sweep(tmp_path, older_than_s=-1) == 12
    assert held(tmp_path) == before
    assert Counter(Path(path).name[:9] for path in files_of(tmp_path)) == {"compacted": groups}
    assert compact(tmp_path).files_before == 0
    assert archived(tmp_path)["a"].position == 60


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "say what to archive"),
        ({"streams": ("a",), "trim": "fold"}, "only streams of a bucket"),
        ({"bucket": "abcd", "streams": ("a",), "prefix": "b"}, "not both"),
        ({"bucket": "abcd", "trim": "pointer", "trim_after_s": 1, "format": "delta"}, "needs the times of a manifest"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Archive(lake=Path("lake"), **settings)


def test_a_directory_that_is_no_lake_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(LakeTrouble, match="is not a lake"):
        files_of(tmp_path)
