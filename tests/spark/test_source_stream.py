"""Micro-batches: limits, replays, restarts, new streams, and waiting without polling."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from headwater.spark.options import source_options
from headwater.spark.source import HeadwaterSource
from headwater.spark.stream_reader import MicroBatchReader
from tests import waiting
from tests.http.watching import samples
from tests.measured import least
from tests.serving import Server
from tests.spark.querying import follow, run, start, wait_until
from tests.spark.streams import Streams


def forget_last_commit(checkpoint: Path) -> int:
    """Remove the last commit, as if the driver had died after the sink wrote a batch and before the checkpoint."""
    commits = checkpoint / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for path in commits.iterdir():
        if path.name.lstrip(".").removesuffix(".crc") == str(last):
            path.unlink()
    return last


def test_limits_cut_batches_and_restarts_continue(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    source, target = streams.filled(stream_name(), [{"n": n} for n in range(1000)]), stream_name()
    frame = follow(spark, streams.root, streams=source, maxRowsPerBatch=400)
    batches = run(frame, streams.root, tmp_path / "c", stream=target, createMissing="true")
    assert [batch["numInputRows"] <= 400 for batch in batches] == [True] * 3
    assert sum(batch["numInputRows"] for batch in batches) == 1000
    streams.append(source, [{"n": 1000}])
    (later,) = run(frame, streams.root, tmp_path / "c", stream=target)
    assert later["numInputRows"] == 1
    assert streams.raw(target) == streams.raw(source)


def test_a_batch_that_is_planned_again_reads_the_same(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    source, target = streams.filled(stream_name(), [{"n": n} for n in range(300)]), stream_name()
    frame = follow(spark, streams.root, streams=source, splitBytes=1000).coalesce(1)
    run(frame, streams.root, tmp_path / "c", stream=target, createMissing="true")
    streams.append(source, [{"n": n} for n in range(300, 350)])
    forget_last_commit(tmp_path / "c")
    batches = run(frame, streams.root, tmp_path / "c", stream=target)
    # The repeated batch has the same 300 rows, which the target recognises; new rows follow it.
    assert [batch["numInputRows"] for batch in batches] == [300, 50]
    assert streams.raw(target) == streams.raw(source)


def test_lag_matches_sparks_progress(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    source = streams.filled(stream_name(), [{"n": n} for n in range(500)])
    frame = follow(spark, streams.root, streams=source, maxRowsPerBatch=200)
    batches = run(frame, streams.root, tmp_path / "c", stream=stream_name(), createMissing="true")
    for batch in batches:
        (published,) = batch["sources"]
        assert json.loads(published["latestOffset"]) == {source: {"offset": streams.tail(source), "position": 500}}
        assert json.loads(published["endOffset"])[source]["position"] <= 500
    assert json.loads(batches[-1]["sources"][0]["endOffset"])[source]["offset"] == streams.tail(source)


ENDED = "headwater_requests_total{operation=list_changes,status=204}"
"""Long-polls for changes that ended without one."""


def requests_so_far(server: Server) -> dict[str, float]:
    """The completed requests by operation and status, without those for metrics."""
    found = {name: count for name, count in samples(server).items() if name.startswith("headwater_requests_total{")}
    return {name: count for name, count in found.items() if "operation=metrics," not in name}


def requests_after(server: Server, ended: float) -> tuple[dict[str, float], float]:
    """The completed requests when more than this many long-polls have ended, and the time."""
    found = waiting.wait_until(
        lambda: requests_so_far(server), lambda found: found.get(ENDED, 0) > ended, what="a long-poll ends", every_s=0.1
    )
    return found, time.monotonic()


def test_running_query_picks_up_new_streams_and_waits_without_polling(
    spark: SparkSession, roomy_server: Server, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    family, target = stream_name(), streams.create(stream_name())
    streams.filled(f"{family}/one", [1])
    frame = follow(spark, streams.root, prefix=f"{family}/")
    query = start(frame, streams.root, tmp_path / "c", stream=target)
    try:
        wait_until(lambda: len(streams.raw(target)) == 1, "the first stream is copied", query)
        streams.filled(f"{family}/two", [2, 3])
        wait_until(lambda: len(streams.raw(target)) == 3, "the second stream is copied", query)
        streams.append(f"{family}/one", [4])
        wait_until(lambda: len(streams.raw(target)) == 4, "the new message of the first stream is copied", query)

        def requests_per_s() -> float:
            """From the end of one long-poll to the end of the second after it."""
            before, began_s = requests_after(roomy_server, requests_so_far(roomy_server).get(ENDED, 0))
            after, ended_s = requests_after(roomy_server, before[ENDED] + 1)
            return (sum(after.values()) - sum(before.values())) / (ended_s - began_s)

        # The first measurement may see the end of the last batch.
        idle = least(requests_per_s, 3)
        assert idle <= 3, f"{idle} requests in an idle second; a long-poll of 2 s makes 0.5"
    finally:
        query.stop()
    assert sorted(streams.messages(target)) == [1, 2, 3, 4]


def test_latest_starts_with_later_messages(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    source, target = streams.filled(stream_name(), [1, 2]), streams.create(stream_name())
    frame = follow(spark, streams.root, streams=source, startingOffsets="latest")
    query = start(frame, streams.root, tmp_path / "c", stream=target)
    try:
        wait_until(lambda: any((tmp_path / "c" / "offsets").glob("*")) or query.lastProgress is not None, "it runs")
        streams.append(source, [3])
        wait_until(lambda: len(streams.raw(target)) == 1, "the new message is copied", query)
    finally:
        query.stop()
    assert streams.messages(target) == [3]


def test_latest_is_resolved_once(streams: Streams, stream_name: Callable[[], str]) -> None:
    """Spark asks for the start several times, and again if it plans a first batch again after a crash."""
    source = streams.filled(stream_name(), [1, 2])
    options = {"url": streams.root, "streams": source, "startingOffsets": "latest"}

    def reader() -> MicroBatchReader:
        made = HeadwaterSource(options)
        return MicroBatchReader(source_options(options), made.schema())

    first = reader()
    begun = first.initialOffset()
    streams.append(source, [3])
    end = first.latestOffset(begun, ReadAllAvailable())
    assert first.initialOffset() == begun == end, "the first batch is empty, even if messages arrived in the meantime"
    after_a_crash = reader()
    streams.append(source, [4])
    later = after_a_crash.initialOffset()
    assert later != begun
    assert after_a_crash.partitions(later, end) == [], "nothing before the start is read"
    assert first.partitions(begun, end) == []
    for one in (first, after_a_crash):
        last = one.latestOffset(end, ReadAllAvailable())
        rows = [value for task in one.partitions(end, last) for batch in one.read(task) for value in batch["value"]]
        assert [value.as_py() for value in rows] == ["3", "4"]
        one.stop()


def test_a_stream_that_was_deleted_fails_or_is_skipped(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    kept, lost = streams.filled(stream_name(), [1]), streams.filled(stream_name(), [2])
    target = streams.create(stream_name())

    def copy(**options: Any) -> None:
        run(
            follow(spark, streams.root, streams=f"{kept},{lost}", **options),
            streams.root,
            tmp_path / "c",
            stream=target,
        )

    copy()
    streams.delete(lost)
    streams.append(kept, [3])
    with pytest.raises(StreamingQueryException, match=rf"'{lost}' at .*no such stream.*onGone=restart"):
        copy()
    copy(onGone="skip")
    assert streams.messages(target) == [1, 2, 3]
    streams.create(lost)
    # A new stream with the name is not the one that was read.
    with pytest.raises(StreamingQueryException, match="deleted and created again"):
        copy()
    copy(onGone="skip")
    assert streams.messages(target) == [1, 2, 3]


def test_recreated_stream_is_read_from_its_beginning_on_request(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    source, target = streams.filled(stream_name(), [1, 2, 3]), streams.create(stream_name())
    frame = follow(spark, streams.root, streams=source, onGone="skip")
    run(frame, streams.root, tmp_path / "c", stream=target)
    streams.delete(source)
    streams.filled(source, [4, 5])
    run(frame, streams.root, tmp_path / "c", stream=target)
    assert streams.messages(target) == [1, 2, 3, 4, 5]
