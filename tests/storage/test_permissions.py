"""Only the user that runs the server can access a data directory, whatever the umask is."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headwater.config import StorageSettings
from headwater.core.records import Create
from headwater.engine.open_storage import open_store
from headwater.storage import control_socket
from headwater.storage.interface import Committed, StorageError
from headwater.storage.journaled_store import JournaledStorage
from headwater.storage.offline.atomic_install import atomic_install
from headwater.storage.offline.backup import restore_backup, take_backup
from tests.serving import serve

MODES = ["file-fast", "file-durable", "acid"]


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Set the least restrictive umask."""
    before = os.umask(0)
    yield
    os.umask(before)


@contextmanager
def running(mode: str, directory: Path) -> Iterator[None]:
    """A store with a stream, a blob and a control socket."""
    settings = StorageSettings(mode=mode, data_dir=directory, acid_shard_count=2)
    store = open_store(settings)
    known = {record.id for record in store.storage.recover() if hasattr(record, "id")}
    if 1 not in known:
        batch = [Committed(Create(1, "s", 1, "text/plain", payload=b"secret", lengths=(6,)))]
        store.storage.write(batch)
        store.storage.publish(batch)
    if isinstance(store.storage, JournaledStorage):
        store.storage.maintain(lambda _: None)
    blob = store.blobs.create(7)
    blob.write(b"secret")
    blob.finish()
    with closing(control_socket.listening_socket(directory)):
        yield
    store.storage.close()


def open_to_others(directory: Path) -> list[str]:
    paths = [directory, *directory.rglob("*")]
    assert len(paths) > 6
    return [f"{path.relative_to(directory)} {path.lstat().st_mode:o}" for path in paths if path.lstat().st_mode & 0o077]


@pytest.mark.parametrize("mode", MODES)
def test_a_new_data_directory_is_private_and_its_parents_are_not(tmp_path: Path, mode: str) -> None:
    with running(mode, tmp_path / "a" / "b" / "streams"):
        assert open_to_others(tmp_path / "a" / "b" / "streams") == []
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("mode", MODES)
def test_directory_with_wider_permissions_is_restricted(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "streams"
    with running(mode, directory):
        pass
    caplog.clear()
    with running(mode, directory):
        pass
    assert "restricted" not in caplog.text
    outside = tmp_path / "outside"
    outside.write_text("not ours")
    (directory / "link").symlink_to(outside)
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)
    with caplog.at_level(logging.WARNING, "headwater.storage"), running(mode, directory):
        (directory / "link").unlink()
        assert open_to_others(directory) == []
    assert "is now restricted to this user" in caplog.text
    assert outside.stat().st_mode & 0o777 == 0o666


def test_directory_created_with_wide_permissions_is_restricted(tmp_path: Path) -> None:
    directory = tmp_path / "streams"
    directory.mkdir(mode=0o777)
    with running("acid", directory):
        assert open_to_others(directory) == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_permissions_of_a_directory_with_other_files_are_not_changed(tmp_path: Path, workers: str) -> None:
    directory = tmp_path / "pictures"
    (directory / "holidays").mkdir(parents=True, mode=0o777)
    (directory / "holidays" / "beach").touch(mode=0o666)
    settings: dict[str, Any] = {"DS_STORAGE__MODE": "file-durable", "DS_STORAGE__DATA_DIR": str(directory)}
    with (
        pytest.raises(AssertionError, match=r"it\W+contains\W+holidays"),
        serve(directory=tmp_path, DS_SERVER__WORKERS=workers, **settings),
    ):
        pass
    with pytest.raises(StorageError, match="it contains holidays"), atomic_install(directory):
        pass
    assert directory.stat().st_mode & 0o777 == (directory / "holidays").stat().st_mode & 0o777 == 0o777
    assert (directory / "holidays" / "beach").stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("mode", MODES)
def test_backups_and_what_is_restored_from_them_are_private(tmp_path: Path, mode: str) -> None:
    directory, backup = tmp_path / "streams", tmp_path / "backup"
    with running(mode, directory):
        pass
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    backup.mkdir(mode=0o777)
    take_backup(directory, backup)
    assert open_to_others(backup) == []
    for path in (backup, *backup.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    restore_backup(backup, tmp_path / "restored")
    assert open_to_others(tmp_path / "restored") == []
