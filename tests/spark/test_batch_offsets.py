"""User-defined offsets, without Spark: their meaning at the ends of a stream, and invalid ones."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from headwater.spark.errors import OptionError
from headwater.spark.options import source_options
from headwater.spark.source import HeadwaterSource
from headwater.spark.stream_reader import MicroBatchReader
from tests import waiting
from tests.spark.driving import Query
from tests.spark.streams import Streams
from tests.spark.test_recreated import batch_rows, batch_values

TRIMMED = {"Content-Type": "text/plain", "Stream-Retention-Bytes": "2000", "Stream-Retention-Drop": "allowed"}


@pytest.fixture
def source(streams: Streams, stream_name: Callable[[], str]) -> str:
    return streams.filled(stream_name(), range(10))


def trimmed(streams: Streams, name: str) -> list[str]:
    """Create a stream whose first messages were dropped; return the remaining ones."""
    streams.http.put(f"{streams.root}/{name}", headers=TRIMMED).raise_for_status()
    texts = [f"{n:0500d}" for n in range(20)]
    for text in texts:
        streams.append_bytes(name, text.encode(), "text/plain")
    # Retention works in steps: wait for the last one, which leaves the size limit plus an eighth.
    content = waiting.wait_until(lambda: streams.content(name), lambda content: len(content) <= 2250).decode()
    left = [text for text in texts if text in content]
    assert 0 < len(left) < len(texts), "the server dropped some of the messages"
    return left


def test_start_after_the_end_is_an_error(streams: Streams, source: str) -> None:
    middle, end = streams.tail(source), streams.append(source, [10, 11])
    with pytest.raises(OptionError, match=rf"startingOffsets {end} of stream .* is after endingOffsets {middle}"):
        batch_values(streams, streams=source, startingOffsets=end, endingOffsets=middle)
    assert batch_values(streams, streams=source, startingOffsets=middle, endingOffsets=middle) == []


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_offset_beyond_the_tail_is_an_error(streams: Streams, source: str, option: str) -> None:
    tail = streams.tail(source)
    beyond = f"{int(tail[:16], 16) + 5:016x}_{int(tail[17:33], 16) + 50:016x}{tail[33:]}"
    with pytest.raises(OptionError, match=f"{option} {beyond} is beyond the end of stream"):
        batch_values(streams, **{"streams": source, option: beyond})


def test_a_query_cannot_start_beyond_the_tail(streams: Streams, source: str) -> None:
    tail = streams.tail(source)
    beyond = f"{int(tail[:16], 16) + 5:016x}_{int(tail[17:33], 16) + 50:016x}{tail[33:]}"
    with pytest.raises(OptionError, match="is beyond the end of stream"):
        Query(streams, streams=source, startingOffsets=beyond).batch()


def test_earliest_is_the_earliest_retained_message(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    left = trimmed(streams, name)
    rows = batch_rows(streams, streams=name)
    assert [value for value, _, _ in rows] == left
    assert [position for _, _, position in rows] == list(range(20 - len(left), 20))
    assert rows[-1][1] == streams.tail(name)
    assert Query(streams, streams=name).batch() == left


def test_new_stream_is_read_from_the_earliest_retained_message(
    streams: Streams, stream_name: Callable[[], str]
) -> None:
    family = stream_name()
    streams.filled(f"{family}/a", [1])
    query = Query(streams, prefix=f"{family}/")
    assert query.batch() == ["1"]
    left = trimmed(streams, f"{family}/b")
    assert query.batches_until(len(left)) == left


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_unknown_name_in_offsets_is_an_error(streams: Streams, source: str, option: str) -> None:
    offsets = json.dumps({source: "latest", "no-such": "latest"})
    with pytest.raises(OptionError, match=f"{option} names 'no-such', which the query does not read"):
        batch_values(streams, **{"streams": source, option: offsets})


def test_streaming_read_checks_names_and_rejects_an_end(streams: Streams, source: str) -> None:
    def reader(**more: str) -> MicroBatchReader:
        given = {"url": streams.root, "streams": source, **more}
        return MicroBatchReader(source_options(given), HeadwaterSource(given).schema())

    with pytest.raises(OptionError, match="names 'no-such'"):
        reader(startingOffsets=json.dumps({"no-such": "latest"}))
    with pytest.raises(OptionError, match="endingOffsets is only for batch reads"):
        reader(endingOffsets=streams.tail(source))


def test_many_streams_under_a_limit_take_few_requests_and_turns(
    streams: Streams, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater.spark import protocol

    family = stream_name()
    for n in range(150):
        streams.filled(f"{family}/{n:03d}", [f"{n}-{at}" for at in range(5)])
    asked = 0
    splits = protocol.StreamsClient.splits

    def counted(*args: object) -> object:
        nonlocal asked
        asked += 1
        return splits(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(protocol.StreamsClient, "splits", counted)
    query = Query(streams, prefix=f"{family}/", maxRowsPerBatch="200")
    batches: list[list[str]] = []
    while sum(map(len, batches)) < 750:
        asked = 0
        batches.append(query.batch())
        assert 0 < len(batches[-1]) <= 200
        assert asked <= 64 * 4
    values = [json.loads(value) for batch in batches for value in batch]
    assert sorted(values) == sorted(f"{n}-{at}" for n in range(150) for at in range(5))
    assert len({value.split("-")[0] for value in map(json.loads, batches[0] + batches[1] + batches[2])}) == 150
