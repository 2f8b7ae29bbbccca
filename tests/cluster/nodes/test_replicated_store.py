"""The store of a shard: opened from Postgres and the object store alone, and what a former owner can do to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from headwater.cluster.nodes.postgres_journal import PostgresJournal
from headwater.cluster.nodes.schema import connect
from headwater.cluster.nodes.standby import StandbyJournal
from headwater.stack.database import LocalPostgres
from headwater.storage.blobs import BLOBS_NAME, FileBlobs
from headwater.storage.interface import CorruptError, StorageError, WriteFailedError
from headwater.storage.tiering.claimed_prefix import ClaimedPrefix
from headwater.storage.tiering.objects import Objects
from headwater.storage.tiering.open import TierSettings, open_replicated
from headwater.storage.tiering.standby_store import FollowedStorage, Promotion
from tests.storage.acid.driver import messages_of
from tests.storage.tiering.driving import SMALL, TieredRun
from tests.storage.tiering.objects import SwitchedObjects, memory_objects
from tests.waiting import wait_until

LARGE = [bytes([number]) * 12_500 for number in range(40)]


class Shard:
    """A shard whose epochs the test gives out."""

    def __init__(self, running: LocalPostgres, number: int, directory: Path, objects: Objects) -> None:
        self._running = running
        self._number = number
        self._directory = directory
        self._objects = objects

    @contextmanager
    def opened(
        self, epoch: int, *, grace_s: float = 3600.0, keep_s: float = 0.0, backlog_bytes: int = 2**30
    ) -> Iterator[TieredRun]:
        with connect(self._running.url, "test") as connection:
            connection.execute("UPDATE headwater.shard SET epoch = %s WHERE id = %s", [epoch, self._number])
        journal = PostgresJournal(
            self._running.url, self._number, epoch, require_standby=False, is_ours=lambda: False, keep_s=keep_s
        )
        tier = TierSettings(2**30, backlog_bytes, grace_s, retry_s=0.02)
        directory = self._directory / str(epoch)
        with closing(journal):
            storage, files = open_replicated(self._objects, directory, tier, SMALL, epoch=epoch, replica=journal)
            with closing(storage):
                run = TieredRun(storage, files, directory)
                run.driver.ids = random.Random(epoch)
                yield run

    @contextmanager
    def followed(
        self, epoch: int, script: Sequence[Callable[[], object]], *, head_s: float = 0.0, grace_s: float = 3600.0
    ) -> Iterator[TieredRun]:
        """A standby, which takes the shard over in this epoch after the script; it reads the journal after each
        step."""
        followed = StandbyJournal(self._running.url, self._number)
        steps = iter(script)
        taken: list[PostgresJournal] = []

        def wait() -> Promotion | None:
            step = next(steps, None)
            if step is not None:
                step()
                return None
            with connect(self._running.url, "test") as connection:
                connection.execute("UPDATE headwater.shard SET epoch = %s WHERE id = %s", [epoch, self._number])
            taken.append(
                PostgresJournal(self._running.url, self._number, epoch, require_standby=False, is_ours=lambda: False)
            )
            followed.check_timeline()
            return Promotion(epoch, taken[0])

        directory = self._directory / f"standby-{epoch}"
        tier = TierSettings(2**30, 2**30, grace_s, retry_s=0.02)
        storage = FollowedStorage(
            self._objects,
            directory,
            tier,
            SMALL,
            journal=followed,
            wait=wait,
            on_warm=lambda: None,
            head_s=head_s,
        )
        try:
            with closing(storage):
                run = TieredRun(storage, storage.files, directory)
                run.driver.ids = random.Random(epoch)
                yield run
        finally:
            for journal in taken:
                journal.close()

    def batches(self) -> int:
        with connect(self._running.url, "test") as connection:
            row = connection.execute("SELECT count(*) FROM headwater.journal WHERE shard = %s", [self._number])
            found = row.fetchone()
        assert found is not None
        return int(str(found[0]))


@pytest.fixture
def objects() -> SwitchedObjects:
    return SwitchedObjects(memory_objects())


@pytest.fixture
def store(single: LocalPostgres, shard: int, tmp_path: Path, objects: SwitchedObjects) -> Shard:
    return Shard(single, shard, tmp_path, objects)


def test_everything_acknowledged_is_there_on_another_disk(store: Shard) -> None:
    with store.opened(1) as run:
        stream = run.driver.create("s", LARGE)
        run.driver.commit()
        run.driver.append(stream, [b"before a checkpoint"])
        run.driver.commit()
    with store.opened(2) as run:
        again = run.driver.catalog.by_id[stream.id]
        assert messages_of(run.storage, again) == [*LARGE, b"before a checkpoint"]
        run.store()
        run.driver.append(again, [b"after it"])
        run.driver.commit()
        run.driver.delete(run.driver.create("t", [b"gone"]))
        run.driver.commit()
    with store.opened(3) as run:
        assert [each.name for each in run.driver.catalog] == ["s"]
        assert messages_of(run.storage, run.driver.catalog.by_id[stream.id])[-2:] == [
            b"before a checkpoint",
            b"after it",
        ]


def test_journal_is_trimmed_once_the_object_store_has_it(store: Shard, objects: SwitchedObjects) -> None:
    with store.opened(1) as run:
        stream = run.driver.create("s", LARGE)
        run.driver.commit()
        objects.is_down = True
        run.save()
        assert store.batches() == 1, "it is in a local pack, which this disk may lose"
        objects.is_down = False
        run.store()
        assert store.batches() == 0
        run.driver.append(stream, [b"more"])
        run.driver.commit()
        assert store.batches() == 1
    with store.opened(2) as run:
        assert messages_of(run.storage, run.driver.catalog.by_id[stream.id]) == [*LARGE, b"more"]


def test_writes_continue_without_the_object_store_until_its_backlog_is_full(
    store: Shard, objects: SwitchedObjects
) -> None:
    """All of them stay in the journal in Postgres, because this disk may be lost."""
    with store.opened(1, backlog_bytes=700_000) as run:
        objects.is_down = True
        first = run.driver.create("s", LARGE)
        run.save()
        assert run.storage.busy() is None
        run.driver.create("t", LARGE)
        run.save()
        assert "wait for the object store" in (run.storage.busy() or "")
        assert run.storage.refusal() is None, "reads work, and writes get a Retry-After"
        assert store.batches() == 2
    objects.is_down = False
    with store.opened(2, backlog_bytes=700_000) as run:
        assert messages_of(run.storage, run.driver.catalog.by_id[first.id]) == LARGE
        run.store()
        assert run.storage.busy() is None
        assert store.batches() == 0


def test_long_journal_becomes_several_segments(store: Shard) -> None:
    with store.opened(1) as run:
        stream = run.driver.create("s")
        for message in LARGE:
            run.driver.append(stream, [message])
            # Not through `commit`, which would give time to a checkpoint.
            batch, run.driver.queue = run.driver.queue, []
            run.storage.write(batch)
            run.storage.publish(batch)
    with store.opened(2) as run:
        assert run.storage.parts()["segments"] > 3
        assert messages_of(run.storage, run.driver.catalog.by_id[stream.id]) == LARGE


def test_former_owner_can_neither_write_nor_replace_the_manifest_nor_delete(
    store: Shard, objects: SwitchedObjects
) -> None:
    with store.opened(1, grace_s=0.0) as former:
        stream = former.driver.create("s", LARGE)
        former.store()
        with store.opened(2) as run:
            heir = run.driver.catalog.by_id[stream.id]
            run.driver.append(heir, [b"of the new owner"])
            run.store()
            before = objects.sizes("")
            former.driver.append(stream, [b"of the former one"])
            with pytest.raises(WriteFailedError, match="taken over"):
                former.driver.commit()
            assert former.storage.failure is not None
            former.uploader.saved(former.uploader._state._replace(lsn=99))  # type: ignore[union-attr]
            wait_until(lambda: former.uploader.failure, what="the refusal of the object store")
            assert "taken over" in str(former.uploader.failure)
            after = objects.sizes("")
            assert {key: after.get(key) for key in before} == before
            assert messages_of(run.storage, heir) == [*LARGE, b"of the new owner"]


def test_former_owner_that_did_not_ask_would_delete_what_is_needed(
    store: Shard, objects: SwitchedObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken variant: without the condition on HEAD, what the test above checks is lost."""
    with store.opened(1, grace_s=0.0) as former:
        former.driver.create("s", LARGE)
        former.store()
        with store.opened(2):
            pass
        monkeypatch.setattr(ClaimedPrefix, "commit", lambda *_: None)
        monkeypatch.setattr(ClaimedPrefix, "check_ownership", lambda *_: None)
        former.uploader.saved(former.uploader._state._replace(packs=()))  # type: ignore[union-attr]
        wait_until(lambda: not objects.sizes("packs/"), what="the packs to be deleted")
    with pytest.raises(CorruptError, match="is missing"), store.opened(3):
        pass


def test_epoch_that_is_not_new_cannot_open_the_store(store: Shard) -> None:
    with store.opened(5):
        pass
    with pytest.raises(StorageError, match="taken over"), store.opened(5):
        pass


def test_journal_with_a_gap_or_damage_is_refused(store: Shard, single: LocalPostgres, shard: int) -> None:
    with store.opened(1) as run:
        stream = run.driver.create("s")
        for message in LARGE[:3]:
            run.driver.append(stream, [message])
            run.driver.commit()
    with connect(single.url, "test") as connection:
        connection.execute(
            "UPDATE headwater.journal SET batch = set_byte(batch, 40, 1 + get_byte(batch, 40) %% 200)"
            " WHERE shard = %s AND seq = 3",
            [shard],
        )
    with pytest.raises(CorruptError, match="is damaged"), store.opened(2):
        pass
    with connect(single.url, "test") as connection:
        connection.execute("DELETE FROM headwater.journal WHERE shard = %s AND seq = 3", [shard])
    with pytest.raises(CorruptError, match="continues with record 4"), store.opened(3):
        pass


def test_blob_is_in_the_object_store_before_it_exists(store: Shard, objects: SwitchedObjects) -> None:
    with store.opened(1) as run:
        blobs = FileBlobs(run.files, run.directory / BLOBS_NAME, durable=True)
        writer = blobs.create(7)
        writer.write(b"snapshot")
        writer.finish()
        assert list(objects.sizes("blobs/")) == [f"blobs/{7:016x}"]
        objects.is_down = True
        other = blobs.create(8)
        other.write(b"snapshot")
        with pytest.raises(OSError, match="switched off"):
            other.finish()
        objects.is_down = False
    with store.opened(2) as run:
        blob = FileBlobs(run.files, run.directory / BLOBS_NAME, durable=True).open(7)
        assert blob.read(0, 8) == b"snapshot"
        blob.close()
