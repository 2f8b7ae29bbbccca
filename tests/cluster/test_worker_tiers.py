"""An object store and several workers: what belongs together starts, and everything else is refused with advice."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from headwater.cluster import worker_tiers
from headwater.cluster.worker_tiers import check_not_tiered, check_worker_tiers, record_division, share, tier_of_worker
from headwater.config import StorageSettings
from headwater.storage.directory import FORMAT_NAME
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.tiering.claimed_prefix import ClaimedPrefix, ColdMark, ManifestPart, write_mark
from headwater.storage.tiering.object_store import ObjectStoreObjects
from headwater.storage.worker_stores import WorkerStores, read_worker_stores, write_worker_stores
from tests.storage.tiering.driving import opened
from tests.storage.tiering.objects import memory_objects

COLD = "s3://bucket/prefix"
TWO = WorkerStores(version=1, family="log", shards=16, workers=2, generation=1)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> defaultdict[str, ObjectStoreObjects]:
    """The object stores, by URL."""
    by_url: defaultdict[str, ObjectStoreObjects] = defaultdict(memory_objects)
    monkeypatch.setattr(worker_tiers, "open_objects", by_url.__getitem__)
    return by_url


def settings(root: Path, *, accept_data_loss: bool = False, cold: str | None = COLD) -> StorageSettings:
    return StorageSettings(mode="file-durable", data_dir=root, cold=cold, accept_data_loss=accept_data_loss)


def upload(objects: ObjectStoreObjects, directory: Path) -> None:
    """As a worker that has saved its first checkpoint."""
    directory.mkdir(parents=True)
    prefix = ClaimedPrefix(objects)
    prefix.claim(RealFilesystem(), directory)
    prefix.commit(1, (ManifestPart("manifest", 1),))


def test_each_worker_has_a_prefix_and_a_share(tmp_path: Path) -> None:
    tiers = [tier_of_worker(settings(tmp_path), TWO, number) for number in range(2)]
    assert [tier["cold"] for tier in tiers] == [f"{COLD}/workers-1/00", f"{COLD}/workers-1/01"]
    assert tiers[0]["cold_cache_bytes"] == settings(tmp_path).cold_cache_bytes // 2
    assert tier_of_worker(settings(tmp_path, cold=None), TWO, 0) == {}
    assert share(2**20, 4) == 2**20, "a small cache is not divided"


def test_new_directory_and_new_prefix_are_accepted_and_recorded(
    tmp_path: Path, stored: defaultdict[str, ObjectStoreObjects]
) -> None:
    for workers in (1, 2):
        check_worker_tiers(settings(tmp_path), COLD, workers)
    write_worker_stores(tmp_path, TWO)
    for _ in range(2):
        record_division(COLD, TWO)
        check_worker_tiers(settings(tmp_path), COLD, 2)


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_is_refused(
    workers: int, tmp_path: Path, stored: defaultdict[str, ObjectStoreObjects]
) -> None:
    write_worker_stores(tmp_path, TWO)
    with pytest.raises(StorageError, match=r"divided between 2 workers.*--workers 2; or copy"):
        check_worker_tiers(settings(tmp_path), COLD, workers)


def test_store_of_one_process_is_not_divided(tmp_path: Path, stored: defaultdict[str, ObjectStoreObjects]) -> None:
    (tmp_path / FORMAT_NAME).touch()
    check_worker_tiers(settings(tmp_path), COLD, 1)
    with pytest.raises(StorageError, match=r"belong to one process.*--workers 1"):
        check_worker_tiers(settings(tmp_path), COLD, 2)


def test_prefix_of_one_process_is_refused(tmp_path: Path, stored: defaultdict[str, ObjectStoreObjects]) -> None:
    upload(stored[COLD], tmp_path / "one")
    with pytest.raises(StorageError, match=r"streams in s3://bucket/prefix belong to one process"):
        check_worker_tiers(settings(tmp_path / "new"), COLD, 2)


def test_prefix_of_another_directory_is_refused(tmp_path: Path, stored: defaultdict[str, ObjectStoreObjects]) -> None:
    record_division(COLD, TWO)
    other = WorkerStores(version=1, family="log", shards=16, workers=2, generation=2)
    write_worker_stores(tmp_path, other)
    with pytest.raises(StorageError, match="belongs to another data directory"):
        check_worker_tiers(settings(tmp_path), COLD, 2)


def test_lost_directory_is_restored_only_if_the_loss_is_accepted(
    tmp_path: Path, stored: defaultdict[str, ObjectStoreObjects]
) -> None:
    root = tmp_path / "new"
    record_division(COLD, TWO)
    upload(stored[f"{COLD}/workers-1/01"], tmp_path / "lost")
    with pytest.raises(StorageError, match="--accept-data-loss"):
        check_worker_tiers(settings(root), COLD, 2)
    for workers in (1, 3):
        with pytest.raises(StorageError, match="--workers 2"):
            check_worker_tiers(settings(root, accept_data_loss=True), COLD, workers)
    assert read_worker_stores(root) is None
    check_worker_tiers(settings(root, accept_data_loss=True), COLD, 2)
    assert read_worker_stores(root) == TWO


def test_directory_lost_before_its_first_upload_is_restored_only_if_the_loss_is_accepted(
    tmp_path: Path, stored: defaultdict[str, ObjectStoreObjects], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.storage.tiering.uploader.Uploader._run", lambda _: None)
    root = tmp_path / "new"
    record_division(COLD, TWO)
    with opened(stored[f"{COLD}/workers-1/01"], tmp_path / "lost") as run:
        run.driver.create("s", [b"acknowledged"])
        run.driver.commit()
    with pytest.raises(StorageError, match="--accept-data-loss"):
        check_worker_tiers(settings(root), COLD, 2)
    check_worker_tiers(settings(root, accept_data_loss=True), COLD, 2)
    assert read_worker_stores(root) == TWO


def test_start_that_ended_before_the_first_write_is_repeated(
    tmp_path: Path, stored: defaultdict[str, ObjectStoreObjects]
) -> None:
    root = tmp_path / "new"
    record_division(COLD, TWO)
    check_worker_tiers(settings(root), COLD, 2)
    assert read_worker_stores(root) == TWO


def test_start_without_the_object_store_is_refused(tmp_path: Path) -> None:
    write_worker_stores(tmp_path, TWO)
    check_not_tiered(tmp_path)
    directory = TWO.directory(tmp_path, 1)
    directory.mkdir(parents=True)
    write_mark(RealFilesystem(), directory, ColdMark(1, f"{COLD}/workers-1/01", "store", 1))
    with pytest.raises(StorageError, match=r"are in s3://bucket/prefix\. Set storage\.cold to it"):
        check_not_tiered(tmp_path)
