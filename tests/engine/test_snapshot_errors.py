"""Snapshots that cannot be read: an exhausted resource is temporary, damage is `data_corrupt`, neither is a defect."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from random import Random

import pytest

from headwater.core.errors import DataCorrupt, Refusal, StorageUnavailable
from headwater.core.rules import CreateRequest
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.snapshots import OpenSnapshot
from headwater.engine.stream import LiveStream
from headwater.storage.blobs import FileBlobs, MemoryBlobs
from headwater.storage.interface import StorageError
from headwater.storage.memory import MemoryStorage
from headwater.storage.tiering.objects import ObjectStoreError
from tests.engine.seams import ManualClock, ManualScheduler
from tests.storage.faulty_filesystem import FaultyFilesystem

NAME = "/ds/bucket/s"
SNAPSHOT = b"folded" * 100_000


def must_work(result: object) -> None:
    assert not isinstance(result, Refusal), result


class Published:
    """A stream with a snapshot, on a disk that fails the calls which a test selects."""

    def __init__(self) -> None:
        self.disk = FaultyFilesystem(Random(1))
        self.disk.make_directory(Path("/data"))
        self.blobs = FileBlobs(self.disk.mount(), Path("/data/blobs"), durable=True)
        clock = ManualClock()
        scheduler = ManualScheduler(clock)
        self.engine = Engine(MemoryStorage(), clock, scheduler, EngineLimits(), blobs=self.blobs)
        self.engine.start()
        self.engine.buckets.create("bucket", must_work)
        request = CreateRequest(NAME, "text/plain", None, None, False, b"folded")
        self.engine.buckets.create_stream("bucket", request, must_work)
        self.publish()

    def publish(self) -> None:
        upload = self.engine.snapshots.upload()
        upload.write(SNAPSHOT)
        self.engine.snapshots.publish(NAME, "0000000000000001_0000000000000006", "a/b", upload, must_work)

    @property
    def stream(self) -> LiveStream:
        return self.engine.look_up(NAME)

    def open(self) -> OpenSnapshot:
        snapshot = self.engine.snapshots.open(self.stream)
        assert snapshot is not None
        return snapshot

    def read(self) -> bytes:
        snapshot = self.open()
        try:
            return b"".join(snapshot.pages())
        finally:
            snapshot.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE], ids=lambda code: errno.errorcode[code])
def test_snapshot_that_cannot_be_opened_at_the_moment_is_unavailable_and_not_damaged(code: int) -> None:
    published = Published()
    published.disk.fails_on["map", "blobs"] = code
    with pytest.raises(StorageUnavailable, match="'/ds/bucket/s'") as refusal:
        published.open()
    assert "blobs" not in refusal.value.detail, "the location of the file is only logged"
    published.disk.fails_on.clear()
    assert published.read() == SNAPSHOT


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOENT], ids=lambda code: errno.errorcode[code])
def test_snapshot_that_cannot_be_opened_is_data_corrupt(code: int) -> None:
    published = Published()
    published.disk.fails_on["map", "blobs"] = code
    with pytest.raises(DataCorrupt, match="'/ds/bucket/s'") as refusal:
        published.open()
    assert "blobs" not in refusal.value.detail


def test_snapshot_whose_pages_cannot_be_read_is_data_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    published = Published()
    snapshot = published.open()
    call = published.disk.call

    def fail(what: str, path: object, life: int | None = None) -> int:
        if what == "read":
            raise OSError(errno.EIO, "Input/output error")
        return call(what, path, life)

    monkeypatch.setattr(published.disk, "call", fail)
    with pytest.raises(DataCorrupt, match="'/ds/bucket/s'"):
        next(snapshot.pages())
    with pytest.raises(DataCorrupt, match="'/ds/bucket/s'"):
        published.open()


def test_snapshot_in_an_object_store_that_fails_is_unavailable_and_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise ObjectStoreError(errno.EIO, "s3://bucket: no response")

    published = Published()
    monkeypatch.setattr(published.disk, "map", fail)
    with pytest.raises(StorageUnavailable, match="'/ds/bucket/s'"):
        published.open()


def test_other_error_of_a_blob_store_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise StorageError("too many readers")

    published = Published()
    monkeypatch.setattr(published.blobs, "open", fail)
    with pytest.raises(StorageUnavailable):
        published.open()


def test_snapshot_of_another_size_is_data_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    published = Published()
    blobs = MemoryBlobs()
    writer = blobs.create(7)
    writer.write(b"shorter")
    writer.finish()
    monkeypatch.setattr(published.blobs, "open", lambda _: blobs.open(7))
    with pytest.raises(DataCorrupt):
        published.open()


def test_damage_is_logged_once_per_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    published = Published()

    def open_repeatedly(code: int) -> None:
        published.disk.fails_on["map", "blobs"] = code
        for _ in range(3):
            with pytest.raises(Refusal):
                published.open()
        published.disk.fails_on.clear()

    with caplog.at_level(logging.ERROR, "headwater.engine"):
        open_repeatedly(errno.EMFILE)
        open_repeatedly(errno.EIO)
        published.publish()
        open_repeatedly(errno.EIO)
    prefix = "the snapshot of stream '/ds/bucket/s' cannot be read: "
    logged = [record.getMessage() for record in caplog.records]
    assert [message.startswith(prefix) for message in logged] == [True] * 3
    assert ["Too many open files" in message for message in logged] == [True, False, False]
