"""Many streams in one query: one long-poll for all, work proportional to changes, and small offsets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest

from headwater.spark import protocol
from headwater.spark.offsets import PACKED_ABOVE, Place, SplitPlan, offset_to_json, places_from_json
from headwater.spark.options import source_options
from headwater.spark.stream_heads import FollowedHeads, PolledHeads, stream_heads
from tests.spark.driving import Query, stop_all
from tests.spark.streams import Streams

COUNT = PACKED_ABOVE + 50


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    stop_all()


@pytest.fixture
def family(streams: Streams, stream_name: Callable[[], str]) -> str:
    """The prefix of many streams with one message each."""
    prefix = f"{stream_name()}/"
    for n in range(COUNT):
        streams.filled(f"{prefix}{n:04}", [n])
    return prefix


@pytest.mark.parametrize("by", ["prefix", "streams"])
def test_many_streams_do_not_need_a_request_each(
    streams: Streams, family: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    heads: list[str] = []
    head = protocol.StreamsClient.head

    def counted(client: protocol.StreamsClient, name: str) -> protocol.Head:
        heads.append(name)
        return head(client, name)

    monkeypatch.setattr(protocol.StreamsClient, "head", counted)
    names = [f"{family}{n:04}" for n in range(COUNT)]
    query = Query(streams, **({"prefix": family} if by == "prefix" else {"streams": ",".join(names)}))
    assert sorted(map(int, query.batch())) == list(range(COUNT))
    assert query.batch() == []
    streams.append(names[7], ["more"])
    assert query.batches_until(1) == ['"more"']
    assert heads == []
    query.restart()
    streams.append(names[8], ["again"])
    assert query.batches_until(1) == ['"again"']
    assert heads == []


def test_running_query_follows_new_deleted_and_recreated_streams(streams: Streams, family: str) -> None:
    query = Query(streams, prefix=family, onGone="restart")
    assert len(query.batch()) == COUNT
    streams.filled(f"{family}new", ["new"])
    assert query.batches_until(1) == ['"new"']
    streams.delete(f"{family}0003")
    streams.filled(f"{family}0003", ["again"])
    assert query.batches_until(1) == ['"again"']


def test_a_message_is_noticed_while_a_query_waits(streams: Streams, family: str) -> None:
    query = Query(streams, prefix=family, idleWait="120000")
    query.batch()
    streams.append(f"{family}0001", ["now"])
    began = time.monotonic()
    assert query.batches_until(1) == ['"now"']
    assert time.monotonic() - began < 60, "the change ended the wait"


def test_a_limit_leaves_the_rest_for_later_batches(streams: Streams, family: str) -> None:
    query = Query(streams, prefix=family, maxRowsPerBatch="60")
    found: list[str] = []
    while len(found) < COUNT:
        rows = query.batch()
        assert 0 < len(rows) <= 60
        found += rows
    assert sorted(map(int, found)) == list(range(COUNT))
    assert query.batch() == []


def test_few_streams_and_other_servers_are_polled(streams: Streams, node_streams: Streams, family: str) -> None:
    def kind(at: Streams, **options: str) -> type:
        heads = stream_heads(source_options({"url": at.root, **options}))
        heads.close()
        return type(heads)

    assert kind(streams, prefix=family) is FollowedHeads
    assert kind(streams, streams=f"{family}0001") is PolledHeads
    assert kind(node_streams, streams=",".join(f"x{n}" for n in range(100))) is PolledHeads


def test_an_offset_of_many_streams_is_small_and_keeps_everything() -> None:
    places = {
        f"devices/{n:05}": Place(f"{n:016x}_{n * 100:016x}_{n * 2654435761 % 2**64:016x}", n) for n in range(10_000)
    }
    places |= {"counted": Place("opaque", 7, 3), "empty": Place("-1"), "ünï": Place("-1", 5)}
    plan = SplitPlan(1000, 4)
    packed = offset_to_json(places, plan)
    text = json.dumps(packed)
    plain = json.dumps({stream: place.to_json() for stream, place in places.items()})
    assert len(text) * 3 < len(plain)
    assert places_from_json(json.loads(text)) == places
    assert SplitPlan.from_json(json.loads(text)) == plan
    assert offset_to_json(dict(reversed(places.items())), plan) == packed, "equal offsets have equal texts"
