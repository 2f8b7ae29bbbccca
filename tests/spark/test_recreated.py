"""A recreated stream is never continued as if it were the old one.

The source is driven as Spark drives it, without a session.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from headwater.spark.errors import DataGoneError, SourceRecreatedError, StreamMissingError
from headwater.spark.offsets import incarnation_of
from headwater.spark.options import source_options
from headwater.spark.progress import lags
from headwater.spark.reader import BatchReader
from headwater.spark.source import HeadwaterSource
from tests import waiting
from tests.ports import free_port
from tests.serving import serve
from tests.spark.driving import Query, stop_all, without_incarnation
from tests.spark.streams import Streams

READ_NEW = ["restart", "skip", "bootstrap"]


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    stop_all()


def texts(first: int, count: int) -> list[str]:
    """Messages of one size, so that offsets of two streams differ only in the incarnation."""
    return [f'"{n:06d}"' for n in range(first, first + count)]


def refilled(streams: Streams, name: str, first: int, count: int) -> None:
    streams.delete(name)
    streams.filled(name, [json.loads(text) for text in texts(first, count)])


@pytest.fixture
def source(streams: Streams, stream_name: Callable[[], str]) -> str:
    return streams.filled(stream_name(), [json.loads(text) for text in texts(0, 100)])


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
def test_a_recreated_stream_is_an_error_that_names_both_incarnations(
    streams: Streams, source: str, restarts: bool
) -> None:
    query = Query(streams, streams=source)
    assert query.batch() == texts(0, 100)
    old = incarnation_of(streams.tail(source))
    refilled(streams, source, 500, 150)
    new = incarnation_of(streams.tail(source))
    assert old != new
    if restarts:
        query.restart()
    with pytest.raises(SourceRecreatedError, match=f"{old}.*{new}.*onGone=restart"):
        query.batches_until(1)


@pytest.mark.parametrize("on_gone", READ_NEW)
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("count", [60, 100, 150], ids=["shorter", "as long", "longer"])
def test_recreated_stream_is_read_from_its_beginning_with_on_gone(
    streams: Streams, source: str, on_gone: str, restarts: bool, count: int
) -> None:
    query = Query(streams, streams=source, onGone=on_gone)
    assert query.batch() == texts(0, 100)
    refilled(streams, source, 500, count)
    if restarts:
        query.restart()
    assert query.batches_until(1) == texts(500, count)
    assert query.lag() == 0
    streams.append(source, [1])
    query.restart()
    assert query.batch() == ["1"]


def test_batch_across_a_recreation_is_planned_the_same_again(streams: Streams, source: str) -> None:
    query = Query(streams, streams=source, onGone="restart")
    query.batch()
    refilled(streams, source, 500, 150)
    query.restart()
    query.plan()
    assert [value for value, _ in query.rows()] == texts(500, 150)
    streams.append(source, [1])
    query.restart()
    assert [value for value, _ in query.rows()] == texts(500, 150)


def test_a_planned_batch_of_a_deleted_stream_is_never_read_from_the_next_one(streams: Streams, source: str) -> None:
    query = Query(streams, streams=source)
    query.plan()
    refilled(streams, source, 500, 150)
    query.restart()
    with pytest.raises(SourceRecreatedError):
        query.rows()
    query.restart(onGone="restart")
    assert query.rows() == []
    query.place = query.planned
    assert query.batch() == texts(500, 150)


def test_lag_counts_all_of_a_recreated_stream(streams: Streams, source: str) -> None:
    query = Query(streams, streams=source, onGone="restart")
    query.batch()
    stood = json.dumps(query.place)
    refilled(streams, source, 500, 60)
    query.restart()
    query.plan()
    assert sum(lags(stood, json.dumps(query.planned)).values()) == 60


def test_checkpoints_from_before_incarnations_continue_where_they_were(streams: Streams, source: str) -> None:
    query = Query(streams, streams=source)
    query.batch()
    query.place = without_incarnation(query.place)
    query.restart()
    assert query.batch() == []
    assert query.place == without_incarnation(query.place), "an idle query does not rewrite its offset"
    streams.append(source, ["next"])
    query.restart()
    assert query.batch() == ['"next"']
    assert query.place is not None
    assert incarnation_of(query.place[source]["offset"])
    refilled(streams, source, 500, 150)
    query.restart()
    with pytest.raises(SourceRecreatedError):
        query.batch()


def test_batch_planned_before_the_upgrade_reads_the_same_rows_after_it(streams: Streams, source: str) -> None:
    """Even if it is read in several tasks: a retry with other bytes would stop a job."""
    query = Query(streams, streams=source, splitBytes="200")
    query.plan()
    rows = query.rows()
    assert [incarnation_of(offset) for _, offset in rows] == [incarnation_of(streams.tail(source))] * 100
    query.place, query.planned = without_incarnation(query.place), without_incarnation(query.planned)
    query.restart()
    assert query.rows() == [(value, offset[:33]) for value, offset in rows]
    query.place = query.planned
    streams.append(source, ["next"])
    assert query.batch() == ['"next"']


@pytest.mark.parametrize("on_gone", ["restart", "skip"])
def test_a_deleted_stream_is_waited_for(streams: Streams, source: str, on_gone: str) -> None:
    query = Query(streams, streams=source, onGone=on_gone)
    query.batch()
    streams.delete(source)
    query.restart()
    assert query.batch() == []
    streams.filled(source, [json.loads(text) for text in texts(500, 100)])
    query.restart()
    assert query.batch() == texts(500, 100)


def test_restart_does_not_skip_data_that_retention_removed(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    limits = {"Content-Type": "text/plain", "Stream-Retention-Bytes": "2000", "Stream-Retention-Drop": "allowed"}
    streams.http.put(f"{streams.root}/{name}", headers=limits).raise_for_status()
    query = Query(streams, streams=name, onGone="restart")
    assert query.batch() == []
    for _ in range(3):
        streams.append_bytes(name, b"x" * 1000, "text/plain")
    wait_for_retention(streams, name)
    with pytest.raises(DataGoneError) as gone:
        query.batches_until(1)  # A running query notices new messages a moment later.
    assert not isinstance(gone.value, SourceRecreatedError)


def wait_for_retention(streams: Streams, name: str) -> None:
    waiting.wait_until(lambda: "stream-earliest-offset" in streams.http.head(f"{streams.root}/{name}").headers)


def test_a_closed_stream_that_is_created_again_is_noticed_by_a_running_query(streams: Streams, source: str) -> None:
    query = Query(streams, streams=source, onGone="restart")
    assert query.batch() == texts(0, 100)
    streams.http.post(f"{streams.root}/{source}", headers={"Stream-Closed": "true"}).raise_for_status()
    assert query.batch() == []
    refilled(streams, source, 500, 100)
    assert query.batches_until(1) == texts(500, 100)


def test_a_fork_may_be_read_from_an_offset_of_its_source(
    streams: Streams, source: str, stream_name: Callable[[], str]
) -> None:
    fork = stream_name()
    rows = Query(streams, streams=source)
    rows.plan()
    at = rows.rows()[39][1]
    headers = {"Stream-Forked-From": f"/v1/stream/{source}"}
    streams.http.put(f"{streams.root}/{fork}", headers=headers).raise_for_status()
    streams.append(fork, ["own"])
    query = Query(streams, streams=fork, startingOffsets=at)
    assert query.batch() == [*texts(40, 60), '"own"']
    assert query.place is not None
    assert incarnation_of(query.place[fork]["offset"]) == incarnation_of(streams.tail(fork))
    streams.append(fork, ["more"])
    query.restart()
    assert query.batch() == ['"more"']


def batch_rows(at: Streams, /, **options: str) -> list[tuple[str, str, int]]:
    """The value, the offset and the position of each row of a batch read."""
    given = {"url": at.root, **options}
    reader = BatchReader(source_options(given), HeadwaterSource(given).schema())
    return [
        row
        for task in reader.partitions()
        for batch in reader.read(task)
        for row in zip(*(batch[name].to_pylist() for name in ("value", "offset", "position")), strict=True)
    ]


def batch_values(at: Streams, /, **options: str) -> list[str]:
    return [value for value, _, _ in batch_rows(at, **options)]


def test_a_batch_read_from_an_offset_of_a_deleted_stream_is_an_error(streams: Streams, source: str) -> None:
    at = streams.tail(source)
    refilled(streams, source, 500, 150)
    with pytest.raises(SourceRecreatedError):
        batch_values(streams, streams=source, startingOffsets=at)
    with pytest.raises(SourceRecreatedError):
        batch_values(streams, streams=source, endingOffsets=at)
    assert batch_values(streams, streams=source, startingOffsets=at, onGone="restart") == texts(500, 150)
    # An offset of two parts does not identify its stream.
    assert batch_values(streams, streams=source, startingOffsets=at[:33]) == texts(600, 50)


def test_a_query_by_prefix_survives_the_restart_of_a_server_in_memory_mode() -> None:
    port = free_port()
    with serve(port=port, DS_STORAGE__MODE="memory", DS_REGISTRY__ENABLED="true") as server, httpx.Client() as http:
        streams = Streams(f"{server.url}/v1/stream", http)
        streams.filled("mem/a", ["a1", "a2", "a3"])
        query = Query(streams, prefix="mem/", onGone="restart", retryTimeout="20")
        assert query.batch() == ['"a1"', '"a2"', '"a3"']
    with serve(port=port, DS_STORAGE__MODE="memory", DS_REGISTRY__ENABLED="true") as server, httpx.Client() as http:
        streams = Streams(f"{server.url}/v1/stream", http)
        streams.filled("mem/a", ["b1", "b2", "b3", "b4"])
        streams.filled("mem/b", ["c1"])
        assert sorted(query.batches_until(5)) == ['"b1"', '"b2"', '"b3"', '"b4"', '"c1"']


def test_missing_stream_fails_by_default(streams: Streams, source: str) -> None:
    query = Query(streams, streams=source)
    query.batch()
    streams.delete(source)
    query.restart()
    with pytest.raises(StreamMissingError):
        query.batch()
