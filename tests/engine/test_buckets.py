"""Buckets under concurrency: pending and durable changes, and the state after a crash."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from headwater.core.buckets import document_key, stream_name
from headwater.core.errors import Refusal
from headwater.core.records import Create, Document
from headwater.core.rules import CreateRequest
from headwater.engine.buckets import BucketState, StreamPage
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.results import Created, Deleted
from headwater.storage.interface import Committed
from tests.engine.rig import TEXT, Rig, status
from tests.engine.seams import JournalBacking, JournalStorage, ManualClock, ManualScheduler

BUCKET = "bucket"


def asked(call: Callable[[Callable[[Any], None]], None]) -> list[object]:
    answers: list[object] = []
    try:
        call(answers.append)
    except Refusal as refusal:
        answers.append(refusal)
    return answers


def put_bucket(engine: Engine, bucket_id: str = BUCKET) -> list[object]:
    return asked(lambda done: engine.buckets.create(bucket_id, done))


def delete_bucket(engine: Engine, bucket_id: str = BUCKET) -> list[object]:
    return asked(lambda done: engine.buckets.delete(bucket_id, done))


def put(engine: Engine, stream_id: str = "s", body: bytes = b"") -> list[object]:
    request = CreateRequest(stream_name(BUCKET, stream_id), TEXT, None, None, False, body)
    return asked(lambda done: engine.buckets.create_stream(BUCKET, request, done))


def delete(engine: Engine, stream_id: str = "s") -> list[object]:
    return asked(lambda done: engine.delete(stream_name(BUCKET, stream_id), done))


def listing(engine: Engine) -> list[object]:
    return asked(lambda done: engine.buckets.page(BUCKET, "", None, 100, done))


def names(answers: list[object]) -> list[str]:
    [page] = answers
    assert isinstance(page, StreamPage)
    return [stream.name for stream in page.streams]


def with_bucket() -> Rig:
    rig = Rig(commit="thread")
    put_bucket(rig.engine)
    rig.scheduler.run_until_idle()
    return rig


def finish_write(rig: Rig) -> None:
    rig.scheduler.work()
    rig.scheduler.report()


def reopened(rig: Rig) -> Engine:
    """Start a new engine on the records that are durable now."""
    inner = rig.storage._inner
    assert isinstance(inner, JournalStorage)
    clock = ManualClock(rig.clock.at_ms)
    engine = Engine(JournalStorage(inner._journal), clock, ManualScheduler(clock), EngineLimits())
    engine.start()
    return engine


def test_stream_deleted_before_its_creation_is_durable_is_listed_until_the_deletion_is() -> None:
    rig = with_bucket()
    made = put(rig.engine)
    rig.scheduler.tick()
    gone, listed, unrelated = delete(rig.engine), listing(rig.engine), rig.put("unrelated")
    finish_write(rig)
    assert isinstance(made[0], Created)
    assert rig.read(stream_name(BUCKET, "s")) == b"", "the deletion is not durable yet"
    during: list[list[object]] = []
    rig.engine.publisher.on_created.append(lambda _: during.append(listing(rig.engine)))
    finish_write(rig)
    assert isinstance(gone[0], Deleted)
    assert names(listed) == []
    assert isinstance(unrelated[0], Created)
    rig.scheduler.run_until_idle()
    assert names(during[0]) == []


def test_listing_in_the_batch_that_creates_a_stream_that_is_already_deleted() -> None:
    """The listing is answered when its own batch is durable; the deletion is one batch later."""
    rig = with_bucket()
    put(rig.engine)
    listed, other = listing(rig.engine), rig.put("other")
    rig.scheduler.tick()
    delete(rig.engine)
    finish_write(rig)
    assert names(listed) == [stream_name(BUCKET, "s")]
    assert isinstance(other[0], Created)
    rig.scheduler.run_until_idle()
    assert names(listing(rig.engine)) == []


def test_second_incarnation_deleted_before_it_is_durable_does_not_hide_the_first() -> None:
    rig = with_bucket()
    put(rig.engine, body=b"first")
    rig.scheduler.run_until_idle()
    delete(rig.engine)
    put(rig.engine, body=b"second")
    delete(rig.engine)
    assert rig.read(stream_name(BUCKET, "s")) == b"first"
    rig.scheduler.run_until_idle()
    assert names(listing(rig.engine)) == []


def test_bucket_with_a_pending_recreated_stream_is_not_deleted() -> None:
    rig = with_bucket()
    first, gone = put(rig.engine), delete(rig.engine)
    rig.scheduler.tick()
    second = put(rig.engine, body=b"kept")
    finish_write(rig)
    assert first
    assert gone
    refused = delete_bucket(rig.engine)
    rig.scheduler.run_until_idle()
    assert status(refused) == 409
    assert isinstance(second[0], Created)
    assert rig.read(stream_name(BUCKET, "s")) == b"kept"
    assert names(listing(reopened(rig))) == [stream_name(BUCKET, "s")]


def test_bucket_whose_only_stream_is_created_and_deleted_in_one_batch_can_be_deleted() -> None:
    rig = with_bucket()
    put(rig.engine)
    delete(rig.engine)
    gone = delete_bucket(rig.engine)
    rig.scheduler.run_until_idle()
    assert isinstance(gone[0], BucketState)
    assert status(listing(rig.engine)) == 404
    assert status(listing(reopened(rig))) == 404


def test_missing_bucket_of_a_stream_is_restored_at_startup(caplog: pytest.LogCaptureFixture) -> None:
    backing, clock = JournalBacking(), ManualClock()
    name = stream_name(BUCKET, "s")
    backing.open().write([Committed(Create(7, name, clock.at_ms - 5, TEXT, payload=b"kept", lengths=(4,)))])
    for _ in range(2):
        scheduler = ManualScheduler(clock)
        engine = Engine(backing.open(), clock, scheduler, EngineLimits())
        with caplog.at_level(logging.WARNING, "headwater.engine"):
            engine.start()
        scheduler.run_until_idle()
        assert names(listing(engine)) == [name]
        assert status(delete_bucket(engine)) == 409
    assert [BUCKET in record.getMessage() for record in caplog.records] == [True], "only the first start repairs it"


def test_unreadable_bucket_document_does_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    backing, clock = JournalBacking(), ManualClock()
    backing.open().write([Committed(Document(document_key(BUCKET), b"not json"))])
    engine = Engine(backing.open(), clock, ManualScheduler(clock), EngineLimits())
    engine.start()
    assert names(listing(engine)) == []
    assert any(BUCKET in record.getMessage() for record in caplog.records)


def test_fork_without_its_source_does_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.created("source", b"shared")
    rig.created("fork", b"own", source="source")
    journal = rig.storage._inner
    assert isinstance(journal, JournalStorage)
    journal._journal[:] = [
        (encoded, removed)
        for (encoded, removed), kept in zip(journal._journal, journal.kept(), strict=True)
        if getattr(kept.record, "name", "") != "source"
    ]
    engine = reopened(rig)
    stream = engine.look_up("fork")
    with pytest.raises(Refusal) as refusal:
        engine.reader.chunk(stream, engine.reader.resolve(stream, "-1"), 100)
    assert refusal.value.code == "data_corrupt"
    assert any("fork" in record.getMessage() for record in caplog.records)


def test_a_stream_whose_id_has_a_control_character_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier releases created such streams; only new ones are refused."""
    from headwater.core import rules

    rig = Rig()
    put_bucket(rig.engine)
    rig.scheduler.run_until_idle()
    old, name = "old\x1b[2J", stream_name(BUCKET, "old\x1b[2J")
    with monkeypatch.context() as earlier:
        earlier.setattr(rules, "check_new_name", lambda _name: None)
        put(rig.engine, old, b"kept")
    rig.scheduler.run_until_idle()
    assert status(put(rig.engine, "new\x1b[2J")) == 400
    assert status(put(rig.engine, old, b"kept")) is None, "PUT of an existing stream"
    assert rig.read(name) == b"kept"
    assert names(listing(rig.engine)) == [name]
    deleted = delete(rig.engine, old)
    rig.scheduler.run_until_idle()
    assert status(deleted) is None
    assert names(listing(rig.engine)) == []
