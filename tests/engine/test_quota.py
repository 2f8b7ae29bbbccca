"""Metadata of streams, producers and documents is limited like content, and freed with them."""

from __future__ import annotations

import pytest

from headwater.core.buckets import document_key
from headwater.core.errors import MemoryFull
from headwater.engine.buckets import BucketState
from headwater.engine.engine import Engine
from headwater.engine.quota import PRODUCER_BYTES, STREAM_BYTES, EngineLimits, document_bytes, stream_bytes
from tests.engine.rig import TEXT, Rig, status
from tests.engine.seams import JournalStorage, ManualClock, ManualScheduler

DISK = pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])


@DISK
@pytest.mark.parametrize("limit", ["max_total_bytes", "max_metadata_bytes"])
def test_empty_streams_are_limited(disk: bool, limit: str) -> None:
    bound = 3 * stream_bytes("a", TEXT)
    limits = (
        EngineLimits(max_total_bytes=bound) if limit == "max_total_bytes" else EngineLimits(max_metadata_bytes=bound)
    )
    rig = Rig(disk=disk, limits=limits)
    for name in ("a", "b", "c"):
        rig.created(name)
    refused = rig.put("d")
    assert status(refused) == 413
    assert isinstance(refused[0], MemoryFull)
    rig.delete("a")
    rig.scheduler.run_until_idle()
    rig.created("d")


@DISK
def test_content_does_not_count_against_the_limit_of_metadata(disk: bool) -> None:
    rig = Rig(disk=disk, limits=EngineLimits(max_metadata_bytes=stream_bytes("a", TEXT)))
    rig.created("a", b"x" * 100_000)
    rig.post("a", b"x" * 100_000)
    rig.scheduler.run_until_idle()
    assert rig.engine.total_bytes == 200_000
    assert status(rig.put("b")) == 413


@DISK
def test_producers_count_as_metadata(disk: bool) -> None:
    rig = Rig(disk=disk, limits=EngineLimits(max_metadata_bytes=stream_bytes("a", TEXT) + 2 * PRODUCER_BYTES))
    rig.created("a")
    answers = [rig.post("a", b"x", (producer, 0, 0)) for producer in ("p", "q")]
    rig.scheduler.run_until_idle()
    assert [status(each) for each in answers] == [None, None]
    assert status(rig.post("a", b"x", ("r", 0, 0))) == 413
    again = rig.post("a", b"x", ("p", 0, 1))
    rig.scheduler.run_until_idle()
    assert status(again) is None


def test_names_and_content_types_count_as_metadata() -> None:
    assert stream_bytes("x" * 1000, "text/plain") == STREAM_BYTES + 1010


@DISK
def test_sequence_values_count_as_metadata(disk: bool) -> None:
    """A client chooses how long they are, and each stream keeps its last one."""
    rig = Rig(disk=disk, limits=EngineLimits(max_metadata_bytes=2 * stream_bytes("a", TEXT) + 1000))
    rig.created("a")
    rig.created("b")
    assert status(rig.append_in_sequence("a", "1" * 900)) is None
    assert status(rig.append_in_sequence("b", "1" * 900)) == 413
    # The next value replaces it.
    assert status(rig.append_in_sequence("a", "2" * 100)) is None
    assert status(rig.append_in_sequence("b", "1" * 900)) is None
    assert rig.engine.quota.metadata_bytes == 2 * stream_bytes("a", TEXT) + 1000
    rig.delete("a")
    rig.delete("b")
    rig.scheduler.run_until_idle()
    assert rig.engine.quota.metadata_bytes == 0


@DISK
def test_deletions_free_their_metadata(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.created("a", b"x")
    rig.created("b", source="a")
    rig.created("expiring", ttl_secs=1)
    for name in ("a", "b"):
        rig.post(name, b"x", ("p", 0, 0))
    buckets: list[object] = []
    rig.engine.buckets.create("bucket", buckets.append)
    rig.scheduler.run_until_idle()
    bucket = buckets[0]
    assert isinstance(bucket, BucketState)
    key = document_key("bucket")
    expected = sum(stream_bytes(name, TEXT) for name in ("a", "b", "expiring")) + 2 * PRODUCER_BYTES
    assert rig.engine.quota.metadata_bytes == expected + document_bytes(key, rig.engine.catalog.documents[key])
    rig.delete("a")
    rig.delete("b")
    rig.engine.buckets.delete("bucket", buckets.append)
    rig.scheduler.advance(3000)
    rig.scheduler.run_until_idle()
    assert (rig.engine.quota.metadata_bytes, rig.engine.total_bytes) == (0, 0)


def test_usage_is_the_same_after_a_restart() -> None:
    rig = Rig()
    rig.created("a", b"x")
    rig.created("b", source="a")
    rig.post("b", b"x", ("p", 0, 0))
    rig.append_in_sequence("b", "1" * 50)
    rig.engine.put_document("key", b"value", None, None)
    rig.engine.put_document("key", b"longer value", None, None)
    rig.scheduler.run_until_idle()
    inner = rig.storage._inner
    assert isinstance(inner, JournalStorage)
    clock = ManualClock()
    engine = Engine(JournalStorage(inner._journal), clock, ManualScheduler(clock), EngineLimits())
    engine.start()
    assert engine.quota.metadata_bytes == rig.engine.quota.metadata_bytes
    assert engine.quota.content_bytes == rig.engine.quota.content_bytes


def test_buckets_are_limited() -> None:
    rig = Rig(disk=False, limits=EngineLimits(max_metadata_bytes=1000))
    rig.engine.buckets.create("bucket", lambda _: None)
    with pytest.raises(MemoryFull):
        rig.engine.buckets.create("another", lambda _: None)
    assert not rig.engine.buckets.exists("another")
