"""Folds of real streams with Spark: into snapshots for bootstrap and into a Postgres table, batch after batch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psycopg
import pyarrow as pa
import pytest
from pydantic import ValidationError
from pyspark.sql import SparkSession

from headwater.client import Stream
from headwater.pipeline.fold.job import Fold
from headwater.pipeline.fold.snapshot_client import FoldError, SnapshotClient, StreamMessage, snapshot_client
from headwater.pipeline.fold.state import FoldState
from headwater.pipeline.fold.table import FoldTable, connect
from headwater.pipeline.fold.task import FoldTotals
from headwater.pipeline.job import JobEnvironment
from headwater.spark import bounded_ranges
from headwater.spark.errors import DataGoneError
from headwater.spark.offsets import at, split_token
from tests.pipeline.buckets import Bucket, run
from tests.spark.streams import Streams


class Batches:
    """Does what Spark does around a task, without Spark: passes the rows since the last batch to the same task."""

    def __init__(self, fold: Fold, environment: JobEnvironment) -> None:
        self._fold = fold
        self._client = SnapshotClient(fold.connection(environment))
        self._surroundings = environment
        self._places: dict[str, str] = {}
        self.last: list[pa.RecordBatch] = []
        if fold.table:
            with connect(environment.postgres) as connection:
                FoldTable(connection, fold.table).create_missing()

    def run(self, *names: str) -> FoldTotals:
        """Run one batch of everything that is new."""
        self.last = [row for name in sorted(names) for row in self._rows(name)]
        return self.repeat()

    def repeat(self) -> FoldTotals:
        """Run the same batch again."""
        (totals,) = self._fold.task(self._surroundings)(iter(self.last))
        self._client.disconnect()
        snapshot_client(self._fold.connection(self._surroundings)).disconnect()
        return FoldTotals(**{name: value[0] for name, value in totals.to_pydict().items()})

    def _rows(self, name: str) -> list[pa.RecordBatch]:
        start, tail = self._places.get(name, "-1"), self._client.head(name).offset
        self._places[name] = tail
        try:
            return self._read(name, start, tail)
        except DataGoneError as gone:
            return self._read(name, gone.earliest or "", tail)

    def _read(self, name: str, start: str, end: str) -> list[pa.RecordBatch]:
        found = []
        if split_token(start) < split_token(end):
            for run in bounded_ranges.read(self._client, bounded_ranges.span(name, at(start), at(end))):
                positions = pa.array(range(run.first_position, run.first_position + len(run)))
                streams = pa.array([name] * len(run))
                columns = {"stream": streams, "position": positions, "offset": run.ends, "value": run.values}
                found.append(pa.RecordBatch.from_pydict(columns))
        return found


def event(rng: random.Random) -> dict[str, Any]:
    key = f"k{rng.randrange(12)}"
    match rng.randrange(6):
        case 0:
            return {"type": "chunk", "key": key, "operation": "append", "value": rng.choice(["a", "ü", "xyz"])}
        case 1:
            return {"type": "chunk", "key": key, "operation": "append", "value": {"text": "t", "n": rng.random()}}
        case 2:
            return {"type": rng.choice(["chunk", "user"]), "key": key, "operation": "remove"}
        case 3:
            return {"type": "user", "key": key, "value": {"n": rng.random()}, "headers": {"operation": "upsert"}}
        case 4:
            return {
                "type": "chunk",
                "key": key,
                "operation": "set",
                "value": rng.choice(["", [1], None, {"text": "s"}]),
            }
        case _:
            return {"hello": "no change"}


def encoded(events: list[dict[str, Any]]) -> bytes:
    return FoldState().apply_all(json.dumps(one, separators=(",", ":")).encode() for one in events).encoded()


def rows(url: str, table: str = "folds") -> dict[str, dict[tuple[str, str], Any]]:
    found: dict[str, dict[tuple[str, str], Any]] = {}
    with psycopg.connect(url) as connection:
        for stream, kind, key, value in connection.execute(f"SELECT stream, type, key, value FROM {table}"):
            found.setdefault(stream, {})[kind, key] = value
    return found


def entries(events: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    state = FoldState().apply_all(json.dumps(one).encode() for one in events)
    return {key: json.loads(entry.value) for key, entry in state.entries.items()}


def test_snapshot_and_table_equal_the_fold_from_the_beginning_after_every_batch(
    spark: SparkSession, bucket: Bucket, environment: JobEnvironment, postgres_url: str
) -> None:
    environment = JobEnvironment(environment.streams, environment.checkpoints, postgres=postgres_url)
    rng = random.Random(7)
    fold = Fold(bucket=bucket.name, table="folds")
    sent: dict[str, list[dict[str, Any]]] = {f"s{number}": [] for number in range(5)}
    for name in sent:
        bucket.create(name)
    for _ in range(2):
        for name, events in sent.items():
            news = [event(rng) for _ in range(rng.randrange(1, 60))]
            bucket.append(name, news)
            events.extend(news)
        run(spark, fold, environment)
        for name, events in sent.items():
            assert bucket.snapshot_offset(name) == bucket.tail(name)
            assert bucket.snapshot(name) == encoded(events), name
            assert bucket.bootstrapped(name).encoded() == encoded(events)
        assert rows(postgres_url) == {name: found for name, events in sent.items() if (found := entries(events))}


def test_lost_checkpoint_and_new_table_start_from_the_snapshots(
    spark: SparkSession, bucket: Bucket, environment: JobEnvironment, postgres_url: str, tmp_path: Path
) -> None:
    events = [event(random.Random(3)) for _ in range(40)] + [{"type": "a", "key": "q", "operation": "set", "value": 1}]
    bucket.filled("silent", events)
    bucket.filled("lively", events)
    bucket.filled("gone", events)
    Batches(Fold(bucket=bucket.name), environment).run("silent", "lively", "gone")
    bucket.delete("gone")
    more = [{"type": "a", "key": "q", "operation": "append", "value": 2}]
    bucket.append("lively", more)
    new_environment = JobEnvironment(environment.streams, str(tmp_path / "other"), postgres=postgres_url)
    run(spark, Fold(bucket=bucket.name, table="folds"), new_environment)
    assert rows(postgres_url) == {"silent": entries(events), "lively": entries(events + more)}
    assert bucket.snapshot("lively") == encoded(events + more)


def test_snapshots_are_published_every_n_messages_and_lose_nothing_between(
    bucket: Bucket, environment: JobEnvironment
) -> None:
    batches = Batches(Fold(bucket=bucket.name, every=30), environment)
    bucket.create("s")
    sent: list[dict[str, Any]] = []
    published = []
    for number in range(4):
        news = [{"key": "k", "operation": "append", "value": f"{number}.{n} "} for n in range(11)]
        bucket.append("s", news)
        sent += news
        batches.run("s")
        published.append(bucket.snapshot_offset("s"))
        assert bucket.bootstrapped("s").encoded() == encoded(sent)
    assert published[:2] == [None, None]
    assert published[2] is not None
    assert published[3] == published[2]
    assert bucket.snapshot("s") == encoded(sent[:33])


def test_repeated_batch_changes_nothing_and_an_interrupted_one_is_completed(
    bucket: Bucket, environment: JobEnvironment, postgres_url: str
) -> None:
    environment = JobEnvironment(environment.streams, environment.checkpoints, postgres=postgres_url)
    events = [{"key": f"k{n % 3}", "operation": "append", "value": f"{n},"} for n in range(30)]
    for name in ("a", "b", "c"):
        bucket.filled(name, events)
    # Killed after writing the table of a, and after publishing the snapshot of b.
    Batches(Fold(bucket=bucket.name, table="folds", snapshots=False), environment).run("a")
    Batches(Fold(bucket=bucket.name), environment).run("b")
    batches = Batches(Fold(bucket=bucket.name, table="folds"), environment)
    assert batches.run("a", "b", "c").published == 2
    for _ in range(2):
        assert rows(postgres_url) == {name: entries(events) for name in ("a", "c")}
        assert bucket.snapshot("a") == bucket.snapshot("b") == bucket.snapshot("c") == encoded(events)
        again = batches.repeat()
        assert (again.published, again.entries) == (0, 0)
    # The messages of b are deleted, so its rows are missing until the next message restores all of them.
    bucket.append("b", [{"key": "k0", "operation": "append", "value": "!"}])
    batches.run("b")
    assert rows(postgres_url)["b"] == entries([*events, {"key": "k0", "operation": "append", "value": "!"}])


def test_streams_outside_buckets_can_be_folded_only_into_a_table(
    streams: Streams, environment: JobEnvironment, postgres_url: str, stream_name: Callable[[], str]
) -> None:
    environment = JobEnvironment(environment.streams, environment.checkpoints, postgres=postgres_url)
    name = streams.filled(stream_name(), [{"key": "a", "type": "t", "operation": "append", "value": "x"}] * 3)
    batches = Batches(Fold(streams=(name,), snapshots=False, table="public.states"), environment)
    batches.run(name)
    streams.append(name, [{"key": "a", "type": "t", "operation": "append", "value": "y"}])
    streams.append(name, [{"key": "\0", "operation": "set"}])
    batches.run(name)
    assert rows(postgres_url, "states") == {name: {("t", "a"): "xxxy"}}
    streams.append(name, [{"headers": {"control": "reset"}}, {"key": "b", "operation": "set", "value": 1}])
    batches.run(name)
    assert rows(postgres_url, "states") == {name: {("", "b"): 1}}


def test_recreated_stream_is_folded_from_its_beginning(
    bucket: Bucket, environment: JobEnvironment, postgres_url: str
) -> None:
    environment = JobEnvironment(environment.streams, environment.checkpoints, postgres=postgres_url)
    fold = Fold(bucket=bucket.name, table="folds")
    bucket.filled("recreated", [{"key": f"k{n}", "operation": "set", "value": n} for n in range(5)])
    Batches(fold, environment).run("recreated")
    bucket.delete("recreated")
    bucket.filled("recreated", [{"key": "other", "operation": "set", "value": 1}])
    Batches(fold, environment).run("recreated")
    assert rows(postgres_url)["recreated"] == {("", "other"): 1}
    assert json.loads(bucket.snapshot("recreated")) == [{"key": "other", "operation": "set", "value": 1}]


def test_recreated_stream_with_equal_sizes_is_folded_from_its_beginning(
    bucket: Bucket, environment: JobEnvironment, postgres_url: str
) -> None:
    environment = JobEnvironment(environment.streams, environment.checkpoints, postgres=postgres_url)
    fold = Fold(bucket=bucket.name, table="folds")
    bucket.filled("again", [{"key": f"k{n}", "operation": "set", "value": n} for n in range(5)])
    old = Batches(fold, environment)
    old.run("again")
    bucket.delete("again")
    bucket.filled("again", [{"key": f"n{n}", "operation": "set", "value": n} for n in range(5)])
    Batches(fold, environment).run("again")
    expected = {("", f"n{n}"): n for n in range(5)}
    assert rows(postgres_url)["again"] == expected
    # A leftover task of a batch of the old stream.
    old.repeat()
    assert rows(postgres_url)["again"] == expected
    bucket.append("again", [{"key": "last", "operation": "set", "value": 9}])
    Batches(fold, environment).run("again")
    assert rows(postgres_url)["again"] == {**expected, ("", "last"): 9}


def test_snapshot_of_another_writer_stops_the_fold_with_the_reason(bucket: Bucket, environment: JobEnvironment) -> None:
    bucket.filled("s", [{"key": "k", "operation": "set", "value": 1}])
    with Stream(f"{bucket.root}/s") as stream:
        stream.publish_snapshot(bucket.tail("s"), b"\x00\x01")
    bucket.append("s", [{"key": "k", "operation": "set", "value": 2}])
    with pytest.raises(FoldError, match="was not made by a fold"):
        Batches(Fold(bucket=bucket.name), environment).run("s")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"streams": ("a",)}, "only streams of a bucket .* have snapshots"),
        ({"bucket": "abcd", "snapshots": False}, "a fold needs a target"),
        ({"bucket": "abcd", "streams": ("a",), "prefix": "b"}, "not both"),
        ({"snapshots": False, "table": "t"}, "name what to read"),
        ({"bucket": "abcd", "evry": 3}, "Extra inputs"),
    ],
)
def test_invalid_settings_are_rejected_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Fold(**settings)


def test_a_table_keeps_the_fields_that_a_change_names_as_unchanged(postgres_url: str) -> None:
    headers = {"operation": "update", "unchanged": ["body"]}
    changes: list[dict[str, Any]] = [
        {"type": "docs", "key": "1", "value": {"body": "large", "n": 0}, "headers": {"operation": "insert"}},
        {"type": "docs", "key": "1", "value": {"n": 1}, "headers": headers},
    ]
    messages = [
        StreamMessage(n, f"{n + 1:016x}_{n + 1:016x}", json.dumps(change).encode()) for n, change in enumerate(changes)
    ]
    with connect(postgres_url) as connection:
        table = FoldTable(connection, "docs")
        table.create_missing()
        for message in messages:
            table.apply(cast(Any, "not needed: the messages continue at the table's place"), {"s": [message]})
        assert connection.execute("SELECT value FROM docs").fetchall() == [({"n": 1, "body": "large"},)]
