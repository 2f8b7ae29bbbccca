"""A journal in a separate directory: moved at startup, never lost or confused, and included by every tool."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from headwater.config import StorageSettings
from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Append, Create
from headwater.engine.open_storage import open_store
from headwater.storage.interface import Committed, StorageError
from headwater.storage.journal_location import RECORD_NAME
from headwater.storage.offline.atomic_install import PLAIN_STORE_NAMES
from headwater.storage.offline.backup import restore_backup, take_backup
from headwater.storage.offline.check import check
from headwater.storage.offline.purge import purge
from headwater.storage.offline.stats import offline_stats
from headwater.storage.offline.store_copy import copy_between
from headwater.storage.worker_stores import WorkerStores, remove_leftovers
from tests.storage.faulty_filesystem import Crashed, FaultyFilesystem
from tests.storage.model import model_of
from tests.storage.simulation import DATA, TINY, SimulatedProcess

MODES = ["file-durable", "acid"]
FAST = Path("/fast/disk")


def run(directory: Path, journal: Path | None, mode: str = "file-durable", body: bytes = b"") -> int:
    """Run one process that appends this body to the stream of a store; returns the size of the stream."""
    settings = StorageSettings(mode=mode, data_dir=directory, journal_dir=journal, acid_shard_count=2)
    storage = open_store(settings).storage
    try:
        catalog: Catalog[StreamState] = Catalog(StreamState)
        for record in storage.recover():
            catalog.apply(record)
        batch = [] if catalog.by_id else [Committed(Create(1, "s", 1, "text/plain"))]
        for record, _ in batch:
            catalog.apply(record)
        stream = catalog.by_name["s"]
        if body:
            append = Append(1, 2, stream.message_index, stream.byte_position, body, (len(body),))
            catalog.apply(append)
            batch.append(Committed(append))
        if batch:
            storage.write(batch)
            storage.publish(batch)
        return sum(map(len, storage.read(1, 0, stream.byte_position)))
    finally:
        storage.close()


def segments(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.log") if path.stat().st_size)


def journal_of(fast: Path) -> Path:
    (found,) = fast.glob("journal-*")
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_journal_follows_the_setting_with_all_data(tmp_path: Path, mode: str) -> None:
    data, fast, other = tmp_path / "data", tmp_path / "fast", tmp_path / "other"
    assert run(data, None, mode, b"12345") == 5
    assert run(data, fast, mode, b"678") == 8
    assert not segments(data)
    assert segments(fast)
    assert run(data, other, mode, b"9") == 9
    assert not segments(fast)
    assert segments(other)
    assert run(data, None, mode) == 9
    assert segments(data / "log")
    assert not segments(other)


@pytest.mark.parametrize("mode", MODES)
def test_journal_of_a_new_store_is_created_in_the_configured_directory(tmp_path: Path, mode: str) -> None:
    data, fast = tmp_path / "data", tmp_path / "below" / "fast"
    assert run(data, fast, mode, b"12345") == 5
    assert segments(fast)
    assert not segments(data)
    assert run(data, fast, mode, b"6") == 6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", ["same", "other", "unset"])
def test_a_missing_journal_stops_the_start(tmp_path: Path, mode: str, setting: str) -> None:
    data, fast = tmp_path / "data", tmp_path / "fast"
    run(data, fast, mode, b"12345")
    shutil.move(journal_of(fast), tmp_path / "away")
    wanted = {"same": fast, "other": tmp_path / "other", "unset": None}[setting]
    with pytest.raises(StorageError, match=r"is missing: .*journal_dir"):
        run(data, wanted, mode)
    with pytest.raises(StorageError, match="is missing"):
        list(check(data))


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_record_of_the_journal_stops_the_start(tmp_path: Path, mode: str) -> None:
    data, fast = tmp_path / "data", tmp_path / "fast"
    run(data, None, mode, b"12345")
    run(data, fast, mode, b"678")
    (data / RECORD_NAME).unlink()
    with pytest.raises(StorageError, match="log"):
        run(data, None, mode)
    with pytest.raises(StorageError, match="log"):
        run(data, fast, mode)


def test_a_different_journal_stops_the_start(tmp_path: Path) -> None:
    data, fast = tmp_path / "data", tmp_path / "fast"
    run(data, fast, body=b"12345")
    run(tmp_path / "second", tmp_path / "fast2", body=b"1")
    place = journal_of(fast)
    shutil.rmtree(place)
    shutil.copytree(journal_of(tmp_path / "fast2"), place)
    with pytest.raises(StorageError, match="is not the journal of"):
        run(data, fast)


def test_a_journal_whose_disk_is_mounted_elsewhere_is_found(tmp_path: Path) -> None:
    data, fast, elsewhere = tmp_path / "data", tmp_path / "fast", tmp_path / "elsewhere"
    run(data, fast, body=b"12345")
    fast.rename(elsewhere)
    assert run(data, elsewhere, body=b"6") == 6
    assert run(data, elsewhere) == 6


def test_journal_is_locked_by_one_process(tmp_path: Path) -> None:
    """A copy of the data directory refers to the same journal."""
    data, copy, fast = tmp_path / "data", tmp_path / "copy", tmp_path / "fast"
    run(data, fast, body=b"12345")
    shutil.copytree(data, copy)
    storage = open_store(StorageSettings(mode="file-durable", data_dir=data, journal_dir=fast)).storage
    try:
        with pytest.raises(StorageError, match=r"Journal directory .* is in use"):
            run(copy, fast)
        with pytest.raises(StorageError, match=r"Journal directory .* is in use"):
            list(check(copy))
    finally:
        storage.close()


def test_journal_directory_under_another_name_is_not_emptied(tmp_path: Path) -> None:
    data, fast, link = tmp_path / "data", tmp_path / "fast", tmp_path / "link"
    run(data, fast, body=b"12345")
    link.symlink_to(fast)
    assert run(data, link, body=b"6") == 6
    record = data / RECORD_NAME
    record.write_bytes(record.read_bytes().replace(str(fast).encode(), str(link).encode()))
    with pytest.raises(StorageError, match="is in use"):
        run(data, fast)
    record.write_bytes(record.read_bytes().replace(str(link).encode(), str(fast).encode()))
    assert run(data, fast) == 6


def test_journal_dir_cannot_be_within_the_data_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be within"):
        run(tmp_path / "data", tmp_path / "data" / "journal")


@pytest.mark.parametrize("mode", MODES)
def test_offline_tools_include_a_moved_journal(tmp_path: Path, mode: str) -> None:
    data, fast = tmp_path / "data", tmp_path / "fast"
    run(data, fast, mode, b"12345")
    assert list(check(data)) == []
    take_backup(data, tmp_path / "backup")
    assert segments(tmp_path / "backup"), "a backup does not depend on the journal directory"
    assert not (tmp_path / "backup" / RECORD_NAME).exists()
    copy_between(data, mode, tmp_path / "copied", "file-durable", shard_count=2, map_bytes=2**30)
    assert run(tmp_path / "copied", None) == 5
    disk_bytes = offline_stats(data).disk_bytes
    assert disk_bytes > sum(path.stat().st_blocks * 512 for path in data.rglob("*") if path.is_file())
    run(data, fast, mode, b"lost by the restore")
    restore_backup(tmp_path / "backup", data, replace=True)
    assert not list(fast.iterdir()), "the journal of the store that was replaced"
    assert run(data, fast, mode) == 5
    purge(data, mode, shard_count=2, map_bytes=2**30)
    assert not list(fast.iterdir())
    assert run(data, fast, mode) == 5
    (segment, *_) = segments(fast)
    with segment.open("r+b") as file:
        file.write(b"damage")
    assert [problem for problem in check(data) if str(segment) in problem]


def test_journals_of_an_earlier_division_are_removed_with_their_stores(tmp_path: Path) -> None:
    data, fast = tmp_path / "data", tmp_path / "fast"
    stores = WorkerStores(1, "log", 16, 1, 2)
    run(data, fast, body=b"1")
    (data / "workers-1").mkdir()
    run(data / "workers-1" / "00", fast, body=b"12")
    (data / "workers-2").mkdir()
    run(stores.directory(data, 0), fast, body=b"123")
    assert len(list(fast.iterdir())) == 3
    remove_leftovers(data, stores, PLAIN_STORE_NAMES)
    assert len(list(fast.iterdir())) == 1
    assert run(stores.directory(data, 0), fast) == 3


def test_moved_journal_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run(tmp_path / "data", tmp_path / "fast", body=b"secret")
        place = journal_of(tmp_path / "fast")
        for path in (place, *place.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path
            path.chmod(0o755)
        run(tmp_path / "data", tmp_path / "fast", body=b"secret")
        assert all(path.stat().st_mode & 0o077 == 0 for path in (place, *place.rglob("*")))
    finally:
        os.umask(before)


@pytest.mark.parametrize("power", [True, False], ids=["power loss", "kill"])
@pytest.mark.parametrize(("before", "after"), [(None, FAST), (FAST, None), (FAST, Path("/other"))])
def test_a_crash_in_any_call_of_a_move_loses_nothing(
    before: Path | None, after: Path | None, power: bool, long: bool
) -> None:
    first = FaultyFilesystem(Random(1))
    process = SimulatedProcess(first, Random(1), settings=replace(TINY, journal_dir=before))
    process.create("orders")
    for turn in range(20):
        process.append("orders", b"message %03d " % turn * 20)
        process.commit()
    expected = process.model.dump()
    first.crash(power=power)
    process.abandon()
    disk = first.snapshot()
    for number in range(1, 400, 1 if long else 11):
        filesystem = FaultyFilesystem(Random(number))
        filesystem.restore(disk)
        last = filesystem.calls + number
        filesystem.crash_at = last
        with suppress(Crashed):
            SimulatedProcess(filesystem, Random(1), settings=replace(TINY, journal_dir=after))
        is_past_the_end = filesystem.calls < last
        filesystem.crash(power=power)
        for setting in (random_setting(number, before, after), after):
            process = SimulatedProcess(filesystem, Random(2), settings=replace(TINY, journal_dir=setting))
            assert model_of(process.catalog, process.storage).dump() == expected, number
            process.storage.close()
            filesystem.crash(power=power)
        places = {str(Path(name).parent) for name in filesystem.snapshot() if name.endswith(".log")}
        assert len(places) == 1, "the old location is empty"
        assert (str(DATA / "log") in places) == (after is None)
        if is_past_the_end:
            return
    pytest.fail("a start has more calls than were tried")


def random_setting(number: int, *settings: Path | None) -> Path | None:
    """After the crash, the operator may start with the previous setting."""
    return settings[number % len(settings)]
