"""A store opens only with the configuration it was created with, in one process, and if it is complete."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from headwater.core.catalog import Catalog, StreamState
from headwater.storage.acid.layout import shard_of
from headwater.storage.directory import open_directory
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.journaled_store import JournaledStorage
from tests.storage.acid.driver import Driver, messages_of, open_acid, recovered

OPEN_IN_ANOTHER_PROCESS = """
import sys
from contextlib import closing
from pathlib import Path
from headwater.storage.acid.shard_store import acid_storage
from headwater.storage.interface import StorageError
try:
    acid_storage(Path(sys.argv[1]), 4, 2**26)
except StorageError as error:
    print(error)
"""


def open_store(directory: Path, shards: int = 4) -> JournaledStorage:
    return open_acid(directory, shards, 2**26, 2**20)


def fill(directory: Path, messages: int, shards: int = 4) -> None:
    store = open_store(directory, shards)
    driver = Driver([store])
    driver.recover(store)
    for number in range(12):
        stream = driver.catalog.by_name.get(f"stream-{number}") or driver.create(f"stream-{number}")
        driver.append(stream, [b"message"] * messages)
    driver.commit()
    store.close()


def refused(directory: Path, shards: int = 4) -> str:
    """Return the error of opening a store; fail if it opens."""
    try:
        store = open_store(directory, shards)
    except StorageError as error:
        return str(error)
    with closing(store), pytest.raises(StorageError) as error_info:
        list(store.recover())
    return str(error_info.value)


def test_streams_are_routed_by_the_checksum_of_their_name() -> None:
    # These values must never change: otherwise existing stores would lose their streams.
    assert [shard_of(name, 16) for name in ("a", "stream-1", "päth/ß", "")] == [3, 5, 1, 0]
    assert shard_of("stream-1", 256) == 0x15
    assert {shard_of(f"s{n}", 16) for n in range(200)} == set(range(16))


def test_another_shard_count_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    why = refused(tmp_path, 8)
    assert "made with 4 shards" in why
    assert "storage.acid_shard_count is 8" in why
    assert "headwater store copy" in why
    store = open_store(tmp_path, 4)
    assert len(recovered(store).images) == 12
    store.close()


@pytest.mark.parametrize("count", [0, -1, 3, 12, 257, 512])
def test_shard_count_must_be_a_power_of_two_up_to_256(tmp_path: Path, count: int) -> None:
    assert "power of two from 1 to 256" in refused(tmp_path / "data", count)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("count", [1, 2, 256])
def test_every_shard_count_works(tmp_path: Path, count: int) -> None:
    fill(tmp_path, 3, count)
    store = open_store(tmp_path, count)
    catalog: Catalog[StreamState] = Catalog(StreamState)
    for record in store.recover():
        catalog.apply(record)
    assert len(catalog) == 12
    assert all(messages_of(store, stream) == [b"message"] * 3 for stream in catalog)
    store.close()


def test_second_process_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    answer = subprocess.run(
        [sys.executable, "-c", OPEN_IN_ANOTHER_PROCESS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert f"in use by process {os.getpid()}" in answer.stdout
    store.close()


def test_directory_of_the_file_modes_is_refused(tmp_path: Path) -> None:
    open_directory(RealFilesystem(), tmp_path, "log").close()
    assert "was written by storage mode file-fast or file-durable, not acid" in refused(tmp_path)


def test_unfinished_store_is_created_again(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "acid" / "manifest.json").unlink()
    (tmp_path / "acid").rename(tmp_path / "acid.new")
    store = open_store(tmp_path, 8)
    assert recovered(store) == ({}, {})
    store.close()
    assert not (tmp_path / "acid.new").exists()


def test_missing_or_foreign_manifest_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    path = tmp_path / "acid" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.unlink()
    assert "manifest.json is missing" in refused(tmp_path)
    for key, value, why in [
        ("format", 4, "has format 4"),
        ("routing", "seahash", "routes streams by 'seahash'"),
        ("shard_count", 3, "power of two"),
        ("store_id", "nonsense", "is not a manifest"),
        ("colour", "blue", "is not a manifest"),
    ]:
        path.write_text(json.dumps({**manifest, key: value}))
        assert why in refused(tmp_path)
    path.write_text("{")
    assert "is not a manifest" in refused(tmp_path)
    path.write_text(json.dumps(manifest))
    store = open_store(tmp_path)
    assert len(recovered(store).images) == 12
    store.close()


def test_files_of_different_times_or_stores_are_refused(tmp_path: Path) -> None:
    now, earlier, other = tmp_path / "now", tmp_path / "earlier", tmp_path / "other"
    fill(now, 1)
    shutil.copytree(now, earlier)
    fill(now, 1)
    fill(other, 1)

    def with_part(part: str, origin: Path, origin_part: str | None = None) -> Path:
        mixed = tmp_path / "mixed"
        shutil.rmtree(mixed, ignore_errors=True)
        shutil.copytree(now, mixed)
        shutil.rmtree(mixed / part)
        shutil.copytree(origin / (origin_part or part), mixed / part)
        return mixed

    def with_checkpoint_of(origin: Path) -> Path:
        mixed = with_part("log", now)
        shutil.copy(origin / "acid" / "checkpoint", mixed / "acid" / "checkpoint")
        return mixed

    assert "from an older copy" in refused(with_part("acid/shard-02", earlier))
    assert "from an older copy" in refused(with_part("log", earlier))
    assert "mixed up" in refused(with_part("acid/shard-02", other))
    assert "mixed up" in refused(with_part("log", other))
    assert "mixed up" in refused(with_checkpoint_of(other))
    assert "mixed up" in refused(with_part("acid/shard-02", now, "acid/shard-03"))
    shutil.rmtree(now / "acid" / "shard-01")
    assert "shard-01" in refused(now)


def test_start_without_enough_descriptors_fails(tmp_path: Path) -> None:
    fill(tmp_path, 1, 16)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is a number that no descriptor reaches, and other tests may have left gaps below it.
    taken = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = (number for number in itertools.count() if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 20, None)), hard))
    try:
        assert "Too many open files" in refused(tmp_path, 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    store = open_store(tmp_path, 16)
    assert len(recovered(store).images) == 12
    store.close()


def test_damaged_database_error_names_its_path(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    path = tmp_path / "acid" / "shard-01" / "data.mdb"
    path.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(CorruptError, match="shard-01"):
        open_store(tmp_path)


def test_idle_streams_use_no_descriptors_no_threads_and_little_memory(tmp_path: Path) -> None:
    import threading
    import tracemalloc

    count = 20_000
    store = open_store(tmp_path, 16)
    driver = Driver([store])
    driver.recover(store)
    for number in range(count):
        driver.create(f"idle/{number}", [b"message"])
        if number % 1000 == 999:
            driver.commit()
    store.close()
    threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    tracemalloc.start()
    store = open_store(tmp_path, 16)
    seen = sum(1 for _ in store.recover())
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert seen == count
    assert used / count < 400
    assert threading.active_count() <= threads + 1
    assert len(list(Path("/proc/self/fd").iterdir())) < descriptors + 4 * 17 + 4
    store.close()
