"""A data directory is locked, has a format version, and reports clearly why it cannot be opened."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.storage.directory import FORMAT_NAME, LOCK_NAME, open_directory
from headwater.storage.filesystem import Lock, RealFilesystem
from headwater.storage.interface import StorageError

REAL = RealFilesystem()


def test_new_directory_is_created_with_its_parents_and_reopens(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "data"
    first = open_directory(REAL, path, "log")
    assert first.format.family == "log"
    first.close()
    second = open_directory(REAL, path, "log")
    assert second.format == first.format
    second.close()
    second.close()


def test_second_open_names_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    holder = open_directory(REAL, tmp_path, "log")
    with pytest.raises(StorageError, match=rf"in use by process {os.getpid()}\b"):
        open_directory(REAL, tmp_path, "log")
    holder.close()
    open_directory(REAL, tmp_path, "log").close()


def test_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, time\n"
        "from headwater.storage.directory import open_directory\n"
        "from headwater.storage.filesystem import RealFilesystem\n"
        "held = open_directory(RealFilesystem(), pathlib.Path(sys.argv[1]), 'log')\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(StorageError, match=rf"process {process.pid}\b"):
            open_directory(REAL, tmp_path, "log")
        process.kill()
        process.wait(60)
    open_directory(REAL, tmp_path, "log").close()


def test_directory_of_another_mode_is_refused_by_name(tmp_path: Path) -> None:
    open_directory(REAL, tmp_path, "acid").close()
    with pytest.raises(StorageError, match=r"written by storage mode acid, not file-fast or file-durable"):
        open_directory(REAL, tmp_path, "log")
    # A refusal releases the lock.
    open_directory(REAL, tmp_path, "acid").close()


def test_another_version_is_refused(tmp_path: Path) -> None:
    open_directory(REAL, tmp_path, "log").close()
    written = (tmp_path / FORMAT_NAME).read_text()
    (tmp_path / FORMAT_NAME).write_text(written.replace('"version":1', '"version":7'))
    with pytest.raises(StorageError, match="format version 7; this Headwater reads version 1"):
        open_directory(REAL, tmp_path, "log")


def test_damaged_format_file_is_reported_by_path(tmp_path: Path) -> None:
    open_directory(REAL, tmp_path, "log").close()
    (tmp_path / FORMAT_NAME).write_bytes(b'{"version":1,\xff')
    with pytest.raises(StorageError, match=FORMAT_NAME):
        open_directory(REAL, tmp_path, "log")


def test_directory_with_unknown_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StorageError, match=r"not a Headwater data directory.*thesis\.tex"):
        open_directory(REAL, tmp_path, "log")
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.tex", LOCK_NAME}


def test_a_fresh_file_system_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".snapshots").mkdir()
    open_directory(REAL, tmp_path, "log").close()


def test_inspecting_a_missing_directory_does_not_create_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no data directory"):
        open_directory(REAL, tmp_path / "none", "log", create=False)
    assert not (tmp_path / "none").exists()
    with pytest.raises(StorageError, match="not a Headwater data directory"):
        open_directory(REAL, tmp_path, "log", create=False)


def test_system_errors_are_passed_on(tmp_path: Path) -> None:
    class ReadOnly(RealFilesystem):
        def lock(self, path: Path, note: str) -> Lock:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with pytest.raises(StorageError, match="Read-only file system"):
        open_directory(ReadOnly(), tmp_path, "log")
