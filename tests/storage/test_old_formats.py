"""Data directories of earlier versions open without a manual step, and an upgrade that is interrupted is harmless."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headwater.core.catalog import Catalog, StreamState
from headwater.core.floors import floors, own_start
from headwater.core.records import Append
from headwater.storage.acid.shard_store import acid_storage
from headwater.storage.arrival_times import UNKNOWN_MS
from headwater.storage.filesystem import FileAppender, RealFilesystem
from headwater.storage.interface import Committed, Storage, StorageError
from headwater.storage.journaled_store import JournaledStorage
from headwater.storage.offline.backup import restore_backup, take_backup
from headwater.storage.offline.check import check
from headwater.storage.offline.stats import offline_stats
from headwater.storage.offline.store_copy import copy_between
from headwater.storage.packs.pack_store import file_storage

ARCHIVES = Path(__file__).with_name("old_formats")
EXPECTED: dict[str, Any] = json.loads((ARCHIVES / "expected.json").read_text())
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz"))
ACID_NAMES = [name for name in NAMES if name.startswith("acid")]
FIRST_ACID_NAMES = [name for name in ACID_NAMES if name != "acid-second"]


def unpack(name: str, directory: Path) -> Path:
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


def mode_of(name: str) -> str:
    return name.rpartition("-")[0]


def open_store(name: str, directory: Path, filesystem: RealFilesystem | None = None) -> JournaledStorage:
    filesystem = filesystem if filesystem is not None else RealFilesystem()
    if mode_of(name) == "acid":
        return acid_storage(directory, 2, 2**22, filesystem=filesystem)
    return file_storage(filesystem, directory, durable=mode_of(name) == "file-durable")


def contents(store: Storage) -> tuple[Catalog[StreamState], dict[str, Any]]:
    catalog: Catalog[StreamState] = Catalog(StreamState)
    for record in store.recover():
        catalog.apply(record)
    floor_of = floors(catalog)
    streams: dict[str, Any] = {}
    for stream in catalog:
        start = own_start(stream, floor_of[stream.id])
        streams[stream.name] = {
            "id": stream.id,
            "index": stream.message_index,
            "position": stream.byte_position,
            "closed": stream.closed,
            "closed_by": list(stream.closed_by) if stream.closed_by is not None else None,
            "deleted": stream.deleted,
            "stream_seq": stream.stream_seq,
            "retained": [stream.retained_index, stream.retained_position],
            "producers": {key: [state.epoch, state.seq] for key, state in (stream.producers or {}).items()},
            "fork_of": stream.fork.source_name if stream.fork is not None else None,
            "accessed_ms": stream.accessed_ms,
            "data": b"".join(store.read(stream.id, start.byte_position, stream.byte_position)).decode(),
            "lengths": list(store.lengths(stream.id, start.message_index, stream.message_index)),
        }
    documents = {key: value.decode() for key, value in catalog.documents.items()}
    return catalog, {"streams": streams, "documents": documents}


def test_old_directories_exist_for_every_mode() -> None:
    assert {mode_of(name) for name in NAMES} == {"file-fast", "file-durable", "acid"}


@pytest.mark.parametrize("name", NAMES)
def test_an_old_directory_opens_and_continues(tmp_path: Path, name: str) -> None:
    directory = unpack(name, tmp_path / "data")
    with closing(open_store(name, directory)) as store:
        catalog, found = contents(store)
        assert found == EXPECTED
        stream = catalog.by_name["s0"]
        batch = [Committed(Append(stream.id, 2 * 10**12, stream.message_index, stream.byte_position, b"new", (3,)))]
        store.write(batch)
        store.publish(batch)
    with closing(open_store(name, directory)) as store:
        _, found = contents(store)
        added = found["streams"].pop("s0")
        assert added["data"] == EXPECTED["streams"]["s0"]["data"] + "new"
        assert found["streams"] == {key: value for key, value in EXPECTED["streams"].items() if key != "s0"}
        index = added["index"]
        times = [run.at_ms for run in store.arrivals(stream.id, index - 2, index) for _ in range(run.messages)]
        assert times[1] == 2 * 10**12
        assert store.first_since(stream.id, 2 * 10**12) == index - 1
    assert list(check(directory)) == []


@pytest.mark.parametrize("name", ["acid-closed", "acid-second", "file-durable-closed"])
def test_messages_that_were_stored_without_times_have_none(tmp_path: Path, name: str) -> None:
    directory = unpack(name, tmp_path / "data")
    copy_between(directory, mode_of(name), tmp_path / "copy", "acid", shard_count=2, map_bytes=2**24)
    for opened in (open_store(name, directory), acid_storage(tmp_path / "copy", 2, 2**24)):
        with closing(opened) as store:
            catalog, _ = contents(store)
            stream = catalog.by_name["s0"]
            runs = store.arrivals(stream.id, 0, stream.message_index)
            assert sum(run.messages for run in runs) == stream.message_index
            unknown = sum(run.messages for run in runs if run.at_ms == UNKNOWN_MS)
            assert unknown > 0
            assert store.first_since(stream.id, 1) == unknown, "the journal had the times of the others"


@pytest.mark.parametrize("name", NAMES)
def test_the_offline_tools_read_an_old_directory_without_changing_it(tmp_path: Path, name: str) -> None:
    directory = unpack(name, tmp_path / "data")
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert list(check(directory, mode_of(name))) == []
    assert offline_stats(directory).contents.streams == len(EXPECTED["streams"])
    take_backup(directory, tmp_path / "backup")
    copy_between(directory, mode_of(name), tmp_path / "copy", "file-durable", shard_count=4, map_bytes=2**24)
    for path, data in before.items():
        assert path.read_bytes() == data, f"{path} was changed"
    assert list(check(tmp_path / "backup")) == []
    restore_backup(tmp_path / "backup", tmp_path / "restored")
    with closing(open_store(name, tmp_path / "restored")) as store:
        assert contents(store)[1] == EXPECTED
    with closing(file_storage(RealFilesystem(), tmp_path / "copy", durable=True)) as store:
        assert contents(store)[1] == EXPECTED


class ProcessEnded(Exception):
    """The process ends here."""


class InterruptedFilesystem(RealFilesystem):
    """Fails at the given modifying call, and at every one after it."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self._left = fail_at

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise ProcessEnded

    def create(self, path: Path) -> FileAppender:
        self._count()
        return super().create(path)

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        super().replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._count()
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def make_directory(self, path: Path) -> None:
        self._count()
        super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)


def interrupted(name: str, directory: Path, fail_at: int) -> bool:
    """Run an upgrade that fails at this call; return whether it reached the call."""
    store = None
    try:
        store = open_store(name, directory, InterruptedFilesystem(fail_at))
        exhaust(store.recover())
        store.close()
    except ProcessEnded:
        if store is not None:
            # Not a clean shutdown: release only what prevents another store in this process from opening it.
            store._cold.close()
            store._directory.close()
        return True
    return False


def exhaust(records: Iterable[object]) -> None:
    for _ in records:
        pass


@pytest.mark.parametrize("name", ACID_NAMES)
def test_an_upgrade_that_is_interrupted_anywhere_starts_again(tmp_path: Path, name: str) -> None:
    stops = 0
    for fail_at in range(1, 200):
        directory = unpack(name, tmp_path / str(fail_at))
        was_stopped = interrupted(name, directory, fail_at)
        if was_stopped and fail_at % 3 == 0:
            interrupted(name, directory, fail_at // 2 + 1)
        with closing(open_store(name, directory)) as store:
            assert contents(store)[1] == EXPECTED, f"interrupted at call {fail_at}"
        assert list(check(directory)) == []
        stops += was_stopped
        if not was_stopped:
            break
    assert (5 if name == "acid-second" else 10) < stops < 199, "the upgrade was not interrupted everywhere"


@pytest.mark.parametrize("name", FIRST_ACID_NAMES)
def test_the_old_files_stay_until_the_first_checkpoint(tmp_path: Path, name: str) -> None:
    directory = unpack(name, tmp_path / "data")
    root = directory / "acid"
    old_manifest = (root / "manifest.json").read_bytes()
    old_journal = (root / "journal" / "data.mdb").read_bytes()
    store = open_store(name, directory)
    exhaust(store.recover())
    assert json.loads((root / "manifest.json").read_text())["format"] == 3, "an older version must refuse it"
    assert (root / "manifest-1.json").read_bytes() == old_manifest
    assert (root / "journal" / "data.mdb").read_bytes() == old_journal
    batch = [Committed(Append(EXPECTED["streams"]["s4"]["id"], 2 * 10**12, 31, 681, b"new", (3,)))]
    store.write(batch)
    store.publish(batch)
    store.close()
    assert not (root / "manifest-1.json").exists()
    assert not (root / "journal").exists()


@pytest.mark.parametrize("name", ["acid-crashed", "acid-skewed"])
def test_a_damaged_old_journal_is_refused_and_the_format_stays(tmp_path: Path, name: str) -> None:
    directory = unpack(name, tmp_path / "data")
    path = directory / "acid" / "journal" / "data.mdb"
    sound = path.read_bytes()
    refused, at = 0, -1
    while (at := sound.find(b"two-", at + 1)) >= 0:
        path.write_bytes(sound[:at] + b"X" + sound[at + 1 :])
        if list(check(directory)):
            refused += 1
            with closing(open_store(name, directory)) as store, pytest.raises(StorageError, match="entry"):
                exhaust(store.recover())
            assert json.loads((directory / "acid" / "manifest.json").read_text())["format"] == 1
    assert refused > 0
    path.write_bytes(sound)
    with closing(open_store(name, directory)) as store:
        assert contents(store)[1] == EXPECTED
