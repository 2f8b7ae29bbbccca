"""Copies between any two modes have the same states and bytes and store shared data once; a wrong copy is refused."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.core.catalog import Catalog, StreamState
from headwater.core.floors import floors, own_start
from headwater.core.records import ForkPoint, Image, Retain, SnapshotRef
from headwater.storage.acid.offline import ShardBulkLoad
from headwater.storage.blobs import BLOBS_NAME, FileBlobs
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import Storage, StorageError
from headwater.storage.journaled_store import StoreSettings
from headwater.storage.offline.check import check
from headwater.storage.offline.interface import StoredRun
from headwater.storage.offline.stats import offline_stats
from headwater.storage.offline.store_copy import copy_between
from headwater.storage.packs.offline import PackBulkLoad
from headwater.storage.packs.pack_store import file_storage
from tests.storage.acid.driver import Driver, State, messages_of, open_acid, state_of

TINY = StoreSettings(segment_bytes=4096, hot_tail_bytes=6000, reserve_bytes=0, big_bytes=2048, fanout=3)
MODES = ["file-durable", "acid"]


def open_store(mode: str, directory: Path, shards: int = 4) -> Storage:
    if mode == "acid":
        return open_acid(directory, shards, 2**28, 2**16)
    return file_storage(RealFilesystem(), directory, durable=mode == "file-durable", settings=TINY)


def fill(mode: str, directory: Path, seed: int) -> None:
    """Fill a store with producers, closed streams, forks of forks, deleted sources and trimmed streams."""
    dice = random.Random(seed)
    store = open_store(mode, directory)
    driver = Driver([store], ids=dice)
    driver.recover(store)
    streams = [driver.create(f"s{number}", [b"first"]) for number in range(6)]
    for number in range(200):
        stream = dice.choice([each for each in streams if not each.deleted and not each.closed])
        producer = (f"p{number % 3}", 0, number) if number % 2 else None
        messages = [b"x" * dice.randrange(1, 80) for _ in range(dice.randrange(1, 4))]
        driver.append(stream, messages, producer=producer, stream_seq=f"{number:05}" if number % 5 == 0 else None)
        if number % 40 == 39:
            source = dice.choice([each for each in streams if not each.deleted])
            point = ForkPoint(source.id, source.name, source.message_index, source.byte_position)
            streams.append(driver.create(f"fork{number}", [b"own"], fork=point))
        if number % 7 == 0:
            driver.commit()
    driver.append(streams[0], [b"last"], producer=("closer", 2, 0), close=True)
    driver.create(
        "heir", [b"own"], fork=ForkPoint(streams[1].id, "s1", streams[1].message_index, streams[1].byte_position)
    )
    driver.delete(streams[1])
    driver.delete(streams[2])
    retained = next(stream for stream in streams[3:6] if stream.message_index > 3)
    boundary = store.boundary(retained.id, 3)
    assert boundary is not None
    driver.commit()
    driver.retain(retained, 3, boundary)
    driver.document("bucket/one", b"{}")
    driver.document("link/a/b", b"cursor")
    driver.commit()
    snapshot_of(driver, directory, streams[0])
    store.close()


def snapshot_of(driver: Driver, directory: Path, stream: StreamState) -> None:
    blobs = FileBlobs(RealFilesystem(), directory / BLOBS_NAME, durable=True)
    writer = blobs.create(77)
    writer.write(b"snapshot" * 50_000)
    writer.finish()
    ref = SnapshotRef(stream.retained_index, stream.retained_position, "text/plain", 77, 400_000, 5)
    driver._queue(Retain(stream.id, 5, stream.retained_index, stream.retained_position, ref))
    driver.commit()


def contents(mode: str, directory: Path, shards: int = 4) -> tuple[State, dict[str, list[bytes]]]:
    with closing(open_store(mode, directory, shards)) as store:
        catalog: Catalog[StreamState] = Catalog(StreamState)
        for record in store.recover():
            catalog.apply(record)
        floor_of = floors(catalog)
        messages = {
            stream.name: messages_of(store, stream, own_start(stream, floor_of[stream.id])) for stream in catalog
        }
        return state_of(catalog), messages


def copy(source: Path, source_mode: str, target: Path, target_mode: str, shards: int = 4) -> None:
    copy_between(source, source_mode, target, target_mode, shard_count=shards, map_bytes=2**28)


@pytest.mark.parametrize("to_mode", MODES)
@pytest.mark.parametrize("from_mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_copy_has_the_same_content(tmp_path: Path, from_mode: str, to_mode: str, seed: int) -> None:
    fill(from_mode, tmp_path / "a", seed)
    copy(tmp_path / "a", from_mode, tmp_path / "b", to_mode)
    assert list(check(tmp_path / "b")) == []
    assert offline_stats(tmp_path / "b").contents == offline_stats(tmp_path / "a").contents
    found = contents(to_mode, tmp_path / "b")
    assert found == contents(from_mode, tmp_path / "a")
    assert any(image.fork is not None for image in found[0].images.values())
    assert any(image.deleted for image in found[0].images.values())
    blob = FileBlobs(RealFilesystem(), tmp_path / "b" / BLOBS_NAME, durable=True).open(77)
    assert blob.read(0, blob.size) == b"snapshot" * 50_000
    blob.close()


def test_copy_can_change_the_shard_count_and_accepts_writes(tmp_path: Path) -> None:
    fill("acid", tmp_path / "a", 3)
    copy(tmp_path / "a", "acid", tmp_path / "b", "acid", shards=16)
    before = contents("acid", tmp_path / "b", 16)
    store = open_store("acid", tmp_path / "b", 16)
    driver = Driver([store])
    driver.recover(store)
    stream = next(stream for stream in driver.catalog if not stream.closed and not stream.deleted)
    driver.append(stream, [b"more"])
    driver.commit()
    store.close()
    after = contents("acid", tmp_path / "b", 16)
    assert after[1][stream.name] == [*before[1][stream.name], b"more"]


def test_shared_data_of_forks_is_copied_once(tmp_path: Path) -> None:
    store = open_store("file-durable", tmp_path / "a")
    driver = Driver([store])
    driver.recover(store)
    source = driver.create("source", [b"x" * 1000] * 100)
    for number in range(20):
        driver.create(
            f"fork{number}", fork=ForkPoint(source.id, source.name, source.message_index, source.byte_position)
        )
    driver.delete(source)
    driver.commit()
    store.close()
    for mode in MODES:
        copy(tmp_path / "a", "file-durable", tmp_path / mode, mode)
        found = offline_stats(tmp_path / mode).contents
        assert (found.payload_bytes, found.forks, found.deleted_streams) == (100_000, 20, 1)


def test_a_backup_is_not_changed_by_copying_from_it(tmp_path: Path) -> None:
    from headwater.storage.offline.backup import restore_backup, take_backup

    for mode in MODES:
        fill(mode, tmp_path / mode, 4)
        take_backup(tmp_path / mode, tmp_path / f"{mode}-backup")
        copy(tmp_path / f"{mode}-backup", mode, tmp_path / f"{mode}-copy", "file-fast")
        restore_backup(tmp_path / f"{mode}-backup", tmp_path / f"{mode}-restored")
        assert contents("file-fast", tmp_path / f"{mode}-copy") == contents(mode, tmp_path / mode)


def test_damage_is_not_copied(tmp_path: Path) -> None:
    fill("file-durable", tmp_path / "a", 5)
    pack = max((tmp_path / "a" / "packs").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    with pytest.raises(StorageError, match="damaged"):
        copy(tmp_path / "a", "file-durable", tmp_path / "b", "acid")
    assert not (tmp_path / "b").exists()


# -- copies that are wrong ---------------------------------------------------------------------------------------------


def without_producers(image: Image) -> Image:
    return msgspec.structs.replace(image, producers={})


def swapped(runs: Iterable[StoredRun]) -> Iterable[StoredRun]:
    """Swap two messages of equal length."""
    for run in runs:
        data = bytearray(b"".join(run.pieces))
        first = data[0]
        data[0] = data[-1] ^ first ^ 1
        yield StoredRun(run.message_index, run.byte_position, [bytes(data)], run.lengths, run.times)


@pytest.mark.parametrize("sink", [PackBulkLoad, ShardBulkLoad])
@pytest.mark.parametrize("wrong", ["producers", "bytes", "documents", "streams"])
def test_a_wrong_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: type[Any], wrong: str) -> None:
    add_stream = sink.add_stream

    def add(self: Any, image: Image, runs: Iterable[StoredRun]) -> None:
        if wrong == "streams" and not image.fork and not image.deleted and image.name == "s5":
            return
        add_stream(
            self,
            without_producers(image) if wrong == "producers" else image,
            swapped(runs) if wrong == "bytes" else runs,
        )

    monkeypatch.setattr(sink, "add_stream", add)
    if wrong == "documents":
        monkeypatch.setattr(sink, "add_document", lambda *_: None)
    fill("file-durable", tmp_path / "a", 6)
    with pytest.raises(StorageError, match="The copy"):
        copy(tmp_path / "a", "file-durable", tmp_path / "b", "acid" if sink is ShardBulkLoad else "file-durable")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("taken", ["used", "stranger", "itself"])
def test_only_a_new_or_an_empty_directory_is_copied_into(tmp_path: Path, taken: str) -> None:
    fill("file-durable", tmp_path / "a", 7)
    target = tmp_path / "b"
    if taken == "used":
        fill("file-durable", target, 8)
    elif taken == "stranger":
        target.mkdir()
        (target / "precious").write_text("mine")
    else:
        target = tmp_path / "a"
    with pytest.raises(StorageError):
        copy(tmp_path / "a", "file-durable", target, "file-durable")
    assert contents("file-durable", tmp_path / "a")
