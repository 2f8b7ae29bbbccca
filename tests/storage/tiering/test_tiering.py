"""Packs in an object store: uploads, reads, eviction, and the loss of the local disk."""

from __future__ import annotations

import errno
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from obstore.store import LocalStore

from headwater.cluster.start import start_server
from headwater.config.sections import ServerSettings, Settings
from headwater.config.storage import StorageSettings
from headwater.core.catalog import StreamState
from headwater.engine.open_storage import open_store
from headwater.storage.blobs import FileBlobs
from headwater.storage.interface import StorageError, WriteFailedError
from headwater.storage.offline.backup import take_backup
from headwater.storage.offline.purge import purge
from headwater.storage.tiering.block_cache import BLOCK_BYTES, NotLocalError
from headwater.storage.tiering.claimed_prefix import ClaimedPrefix
from headwater.storage.tiering.object_store import ObjectStoreObjects
from headwater.storage.tiering.objects import ObjectStoreError
from headwater.storage.tiering.open import open_objects
from tests.storage.acid.driver import messages_of
from tests.storage.tiering.driving import TieredRun, opened
from tests.storage.tiering.objects import SwitchedObjects, memory_objects
from tests.waiting import wait_until

LARGE = [bytes([number]) * 12_500 for number in range(40)]


def filled(run: TieredRun, name: str = "s", messages: list[bytes] = LARGE) -> StreamState:
    stream = run.driver.create(name, messages)
    run.store()
    return stream


def test_checkpoint_uploads_its_packs_and_the_manifest(tmp_path: Path) -> None:
    objects = memory_objects()
    with opened(objects, tmp_path / "data") as run:
        stream = filled(run)
        assert [name.removeprefix("packs/") for name in objects.sizes("packs/")] == run.local_packs()
        assert all(name.startswith("000001") for name in run.local_packs()), "the name begins with the epoch"
        head = ClaimedPrefix(objects).head
        assert head is not None
        assert head.epoch == 1
        assert head.lsn == run.storage._unsaved.lsn
        manifest = b"".join(found.data for part in head.parts if (found := objects.get(part.key)))
        assert manifest == (tmp_path / "data" / "MANIFEST").read_bytes()
        assert messages_of(run.storage, stream) == LARGE
    with opened(objects, tmp_path / "data") as run:
        again = run.driver.catalog.by_id[stream.id]
        assert messages_of(run.storage, again) == LARGE
        filled(run, "t")
        assert {name[:6] for name in run.local_packs()} == {"000001", "000002"}


def test_data_that_is_not_on_the_disk_is_fetched_in_blocks(tmp_path: Path) -> None:
    objects = SwitchedObjects(memory_objects())
    with opened(objects, tmp_path / "data", cache_bytes=0) as run:
        stream = filled(run, messages=24 * LARGE)
        run.tidy()
        assert run.local_packs() == []
        assert b"".join(run.storage.read(stream.id, 0, 12_500)) == LARGE[0]
        assert run.files.cache.fetched_bytes < stream.byte_position // 2, "not all of the pack was needed"
        assert messages_of(run.storage, stream) == 24 * LARGE
        fetched = objects.count("read")
        assert messages_of(run.storage, stream) == 24 * LARGE
        assert objects.count("read") == fetched, "fetched blocks are cached"
        run.tidy()
        assert list((tmp_path / "data" / "cache").iterdir()) == [], "the cache is limited"
        assert messages_of(run.storage, stream) == 24 * LARGE
        assert objects.count("read") > fetched


def test_event_loop_does_not_wait_for_the_object_store(tmp_path: Path) -> None:
    objects = SwitchedObjects(memory_objects())
    with opened(objects, tmp_path / "data", cache_bytes=0) as run:
        stream = filled(run)
        run.tidy()
        misses = 0
        data = b""
        while not data:
            try:
                with run.files.cache.deferring():
                    data = b"".join(run.storage.read(stream.id, 0, stream.byte_position))
            except NotLocalError as miss:
                misses += 1
                miss.fetched.result(60)
        assert data == b"".join(LARGE)
        assert 1 <= misses <= 2 + len(data) // BLOCK_BYTES
        run.tidy()
        objects.is_down = True
        with run.files.cache.deferring(), pytest.raises(NotLocalError) as missed:
            run.storage.read(stream.id, 0, 10)
        assert missed.value.fetched.exception(60) is not None


def test_cache_keeps_the_most_recently_read_data(tmp_path: Path) -> None:
    objects = memory_objects()
    with opened(objects, tmp_path / "data", cache_bytes=1_200_000) as run:
        streams = []
        for number in range(4):
            streams.append(filled(run, f"s{number}"))
            run.storage.read(streams[0].id, 0, 1)
        run.tidy()
        assert len(run.local_packs()) == 2
        first = run.storage._streams[streams[0].id].extents
        assert int.from_bytes(first[:8], "little") in {int(name[:16]) for name in run.local_packs()}
        for stream in streams:
            assert messages_of(run.storage, stream) == LARGE


def test_writes_continue_without_the_object_store_up_to_the_backlog_limit(tmp_path: Path) -> None:
    objects = SwitchedObjects(memory_objects())
    with opened(objects, tmp_path / "data", backlog_bytes=700_000) as run:
        filled(run)
        objects.is_down = True
        run.driver.create("t", LARGE)
        run.save()
        assert run.storage.busy() is None
        assert run.storage.refusal() is None
        stream = run.driver.create("u", LARGE)
        run.save()
        busy = run.storage.busy()
        assert busy is not None
        assert "wait for the object store" in busy
        assert run.storage.refusal() is None, "reads and writes only get a Retry-After"
        assert messages_of(run.storage, stream) == LARGE
        objects.is_down = False
        wait_until(lambda: run.storage.busy() is None, what="the store has it all")
        assert messages_of(run.storage, stream) == LARGE


def test_blobs_count_for_the_backlog_limit(tmp_path: Path) -> None:
    """They are uploaded without another checkpoint, which there may not be: writes are refused meanwhile."""
    objects = SwitchedObjects(memory_objects())

    def write_blob(run: TieredRun, blob_id: int) -> None:
        writer = FileBlobs(run.files, tmp_path / "data" / "blobs", durable=True).create(blob_id)
        writer.write(bytes(400_000))
        writer.finish()

    with opened(objects, tmp_path / "data", backlog_bytes=700_000) as run:
        filled(run)
        objects.is_down = True
        write_blob(run, 1)
        assert run.storage.busy() is None
        write_blob(run, 2)
        busy = run.storage.busy()
        assert busy is not None
        assert "wait for the object store" in busy
    objects.is_down = False
    with opened(objects, tmp_path / "data", backlog_bytes=700_000) as run:
        wait_until(lambda: run.storage.busy() is None, what="the store has them")
        objects.is_down = True
        for blob_id in (3, 4):
            write_blob(run, blob_id)
        assert run.storage.busy() is not None
        objects.is_down = False
        wait_until(lambda: run.tier.parts()["cold_waiting_bytes"] == 0, what="the store has them")
        assert run.storage.busy() is None
        assert len(objects.sizes("blobs/")) == 4


def test_waiting_blobs_of_the_last_run_count_for_the_backlog_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.storage.tiering.uploader.Uploader._run", lambda _: None)
    objects = memory_objects()
    with opened(objects, tmp_path / "data", backlog_bytes=700_000) as run:
        writer = FileBlobs(run.files, tmp_path / "data" / "blobs", durable=True).create(1)
        writer.write(bytes(800_000))
        writer.finish()
        assert run.storage.busy() is not None
    with opened(objects, tmp_path / "data", backlog_bytes=700_000) as run:
        assert run.storage.busy() is not None


def test_blob_that_is_removed_while_a_manifest_is_uploaded_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.storage.tiering.uploader.Uploader._run", lambda _: None)
    objects = SwitchedObjects(memory_objects())
    with opened(objects, tmp_path / "data") as run:
        run.driver.create("s", [b"x"])
        run.save()
        blobs = FileBlobs(run.files, tmp_path / "data" / "blobs", durable=True)

        def before(kind: str, key: str) -> None:
            if kind == "put" and key.startswith("manifest/"):
                writer = blobs.create(1)
                writer.write(bytes(800_000))
                writer.finish()
                blobs.delete(1)

        objects.before = before
        run.uploader.step()
        assert blobs.ids() == set()
        assert run.tier.parts()["cold_waiting_bytes"] == 0
        run.uploader.step()


def test_restart_continues_waiting_uploads(tmp_path: Path) -> None:
    objects = SwitchedObjects(memory_objects())
    with opened(objects, tmp_path / "data") as run:
        filled(run)
        objects.is_down = True
        stream = run.driver.create("t", LARGE)
        run.save()
    objects.is_down = False
    with opened(objects, tmp_path / "data", cache_bytes=0) as run:
        wait_until(lambda: run.uploader.is_current, what="the upload")
        run.tidy()
        assert run.local_packs() == []
        assert messages_of(run.storage, run.driver.catalog.by_id[stream.id]) == LARGE


def test_a_lost_directory_is_not_replaced_silently(tmp_path: Path) -> None:
    objects = memory_objects()
    with opened(objects, tmp_path / "data") as run:
        stream = filled(run)
        state = run.driver.state()
        run.driver.append(stream, [b"only in the journal"])
        run.driver.commit()
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(StorageError, match="--accept-data-loss"), opened(objects, tmp_path / "data"):
        pass
    with opened(objects, tmp_path / "data", accept_data_loss=True) as run:
        assert run.driver.state() == state
        restored = run.driver.catalog.by_id[stream.id]
        assert messages_of(run.storage, restored) == LARGE
        run.driver.append(restored, [b"after the loss"])
        run.store()
    with opened(objects, tmp_path / "data") as run:
        restored = run.driver.catalog.by_id[stream.id]
        assert messages_of(run.storage, restored) == [*LARGE, b"after the loss"]


def test_directory_lost_before_its_first_upload_is_not_replaced_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = memory_objects()
    with monkeypatch.context() as patch:
        # Nothing is uploaded, as if the object store were unavailable from now on.
        patch.setattr("headwater.storage.tiering.uploader.Uploader._run", lambda _: None)
        with opened(objects, tmp_path / "data") as run:
            run.driver.create("s", [b"acknowledged"])
            run.driver.commit()
            assert run.storage.refusal() is None
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(StorageError, match="--accept-data-loss"), opened(objects, tmp_path / "data"):
        pass
    with opened(objects, tmp_path / "data", accept_data_loss=True) as run:
        assert run.driver.catalog.by_id == {}
        stream = filled(run)
    with opened(objects, tmp_path / "data") as run:
        assert messages_of(run.storage, run.driver.catalog.by_id[stream.id]) == LARGE


def test_store_that_does_not_take_the_first_manifest_is_refused_at_the_start(tmp_path: Path) -> None:
    """As with a policy that allows `HEAD` and nothing else. Otherwise writes would be acknowledged that a later start
    with an empty directory knows nothing of."""
    objects = SwitchedObjects(memory_objects())

    def before(kind: str, key: str) -> None:
        if kind == "put" and key.startswith("manifest/"):
            raise ObjectStoreError(errno.EACCES, "forbidden")

    objects.before = before
    with pytest.raises(StorageError, match="forbidden"), opened(objects, tmp_path / "data"):
        pass
    objects.before = lambda *_: None
    with opened(objects, tmp_path / "data") as run:
        filled(run)
    assert objects.count("create", "HEAD") == 1


def test_a_directory_that_lost_its_journal_does_not_start(tmp_path: Path) -> None:
    objects = memory_objects()
    with opened(objects, tmp_path / "data") as run:
        filled(run)
    shutil.rmtree(tmp_path / "data" / "log")
    with pytest.raises(StorageError, match="cannot be recovered"), opened(objects, tmp_path / "data"):
        pass
    with (
        pytest.raises(StorageError, match="cannot be recovered"),
        opened(objects, tmp_path / "data", accept_data_loss=True),
    ):
        pass


def test_replaced_server_stops_and_deletes_nothing(tmp_path: Path) -> None:
    objects = memory_objects()
    with opened(objects, tmp_path / "old", grace_s=0.0) as old:
        stream = filled(old)
        old.driver.append(stream, [b"never stored"])
        old.driver.commit()
        with opened(objects, tmp_path / "new", accept_data_loss=True) as new:
            heir = new.driver.catalog.by_id[stream.id]
            new.driver.append(heir, [b"of the new one"])
            new.store()
            before = objects.sizes("")
            old.store()
            assert old.uploader.failure is not None
            assert "taken over" in old.uploader.failure
            old.storage.maintain(lambda _: None)
            with pytest.raises(WriteFailedError):
                old.storage.write([])
            after = objects.sizes("")
            assert {key: after.get(key) for key in before} == before, "the objects of the new server are unchanged"
            assert messages_of(new.storage, heir) == [*LARGE, b"of the new one"]
    with pytest.raises(StorageError, match="taken over"), opened(objects, tmp_path / "old"):
        pass


def test_two_directories_do_not_share_a_prefix(tmp_path: Path) -> None:
    objects, others = memory_objects(), memory_objects()
    for each, name in ((objects, "a"), (others, "b")):
        with opened(each, tmp_path / name) as run:
            filled(run)
    with pytest.raises(StorageError, match="another data directory"), opened(others, tmp_path / "a"):
        pass
    with pytest.raises(StorageError, match="no HEAD"), opened(memory_objects(), tmp_path / "a"):
        pass


def test_plain_directory_is_uploaded_to_the_object_store(tmp_path: Path) -> None:
    from headwater.storage.filesystem import RealFilesystem
    from headwater.storage.packs.pack_store import file_storage
    from tests.storage.acid.driver import Driver
    from tests.storage.tiering.driving import SMALL

    plain = file_storage(RealFilesystem(), tmp_path / "data", durable=True, settings=SMALL)
    driver = Driver([plain])
    driver.recover(plain)
    stream = driver.create("s", LARGE)
    driver.commit()
    plain.close()
    objects = memory_objects()
    with opened(objects, tmp_path / "data", cache_bytes=0) as run:
        run.store()
        run.tidy()
        assert run.local_packs() == []
        assert messages_of(run.storage, run.driver.catalog.by_id[stream.id]) == LARGE
    with opened(memory_objects(), tmp_path / "elsewhere") as run:
        filled(run)
        with pytest.raises(StorageError, match="in use"), opened(objects, tmp_path / "elsewhere"):
            pass


def test_an_older_copy_of_the_directory_is_refused(tmp_path: Path) -> None:
    objects = memory_objects()
    with opened(objects, tmp_path / "data") as run:
        stream = filled(run)
        shutil.copytree(tmp_path / "data", tmp_path / "copy", ignore=shutil.ignore_patterns("control*", "LOCK"))
        run.driver.append(stream, [b"more"])
        run.store()
    with pytest.raises(StorageError, match="older copy"), opened(objects, tmp_path / "copy"):
        pass


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    objects = ObjectStoreObjects(LocalStore(tmp_path / "objects"), "file://")
    with pytest.raises(StorageError, match="conditional writes"), opened(objects, tmp_path / "data"):
        pass
    with pytest.raises(StorageError, match="cannot be used"):
        open_objects("nonsense://bucket")


def test_a_store_that_cannot_be_reached_is_refused_at_the_start(tmp_path: Path) -> None:
    objects = SwitchedObjects(memory_objects())
    objects.is_down = True
    with pytest.raises(StorageError, match="switched off"), opened(objects, tmp_path / "data"):
        pass


def test_unreferenced_objects_are_deleted_after_the_grace_period(tmp_path: Path) -> None:
    objects = memory_objects()
    with opened(objects, tmp_path / "data") as run:
        stream = filled(run)
        run.driver.delete(stream)
        run.store()
        run.tidy()
        run.driver.create("t", [b"x"])
        run.store()
        assert run.local_packs() != sorted(name.removeprefix("packs/") for name in objects.sizes("packs/"))
    with opened(objects, tmp_path / "data", grace_s=0.0) as run:
        run.driver.create("u", [b"x"])
        run.store()
        wait_until(
            lambda: [name.removeprefix("packs/") for name in objects.sizes("packs/")] == run.local_packs(),
            what="what is not needed is deleted",
        )
        assert run.driver.catalog.by_name.keys() == {"t", "u"}


def test_blobs_are_uploaded_and_deleted_like_packs(tmp_path: Path) -> None:
    objects = memory_objects()
    content = b"snapshot" * 100_000
    with opened(objects, tmp_path / "data", cache_bytes=0, grace_s=0.0) as run:
        blobs = FileBlobs(run.files, tmp_path / "data" / "blobs", durable=True)
        for blob_id in (7, 8):
            writer = blobs.create(blob_id)
            writer.write(content)
            writer.finish()
        filled(run)
        run.tidy()
        assert list((tmp_path / "data" / "blobs").iterdir()) == []
        assert blobs.ids() == {7, 8}
        with closing(blobs.open(7)) as blob:
            assert blob.read(0, blob.size) == content
        blobs.delete(8)
        with closing(blobs.open(8)) as blob:
            assert blob.size == len(content), "a manifest in the object store may still refer to it"
        run.driver.create("t", [b"x"])
        run.store()
        wait_until(lambda: len(objects.sizes("blobs/")) == 1, what="it is deleted")
        assert blobs.ids() == {7}


def test_other_ways_to_open_the_directory_are_refused(tmp_path: Path) -> None:
    with opened(memory_objects(), tmp_path / "data") as run:
        filled(run)
    plain = StorageSettings(mode="file-durable", data_dir=tmp_path / "data")
    with pytest.raises(StorageError, match=r"Set storage\.cold"):
        open_store(plain)
    with pytest.raises(StorageError, match="not a backup"):
        take_backup(tmp_path / "data", tmp_path / "backup")
    with pytest.raises(StorageError, match="purge"):
        purge(tmp_path / "data", "file-durable", shard_count=1, map_bytes=2**20)
    settings = Settings(
        server=ServerSettings(workers=2),
        storage=StorageSettings(mode="file-durable", data_dir=tmp_path / "data", cold="memory:///"),
    )
    with pytest.raises(StorageError, match="belong to one process"):
        start_server(settings, lambda: settings)
    with pytest.raises(ValueError, match="cold needs mode file-durable"):
        StorageSettings(mode="acid", cold="memory:///")
