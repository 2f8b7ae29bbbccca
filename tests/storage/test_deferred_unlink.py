"""Held files are deleted with their last hold; unfinished files are deleted at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.storage.deferred_unlink import DeferredUnlinkFilesystem


def test_held_file_is_deleted_with_the_last_hold(tmp_path: Path) -> None:
    filesystem = DeferredUnlinkFilesystem()
    path = tmp_path / "0000000000000001.pack"
    path.write_bytes(b"x")
    filesystem.hold()
    filesystem.hold()
    filesystem.unlink(path)
    assert path.exists()
    filesystem.release()
    assert path.exists()
    filesystem.release()
    assert not path.exists()


def test_file_without_a_hold_is_deleted_at_once(tmp_path: Path) -> None:
    filesystem = DeferredUnlinkFilesystem()
    path = tmp_path / "0000000000000001.log"
    path.write_bytes(b"x")
    filesystem.hold()
    filesystem.release()
    filesystem.unlink(path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["MANIFEST.new", "0123456789abcdef.part"])
def test_reused_name_is_free_at_once(tmp_path: Path, name: str) -> None:
    filesystem = DeferredUnlinkFilesystem()
    (tmp_path / name).write_bytes(b"x")
    filesystem.hold()
    filesystem.unlink(tmp_path / name)
    filesystem.create(tmp_path / name).close()
    filesystem.release()
    assert (tmp_path / name).exists()


def test_deleting_a_missing_file_is_not_an_error(tmp_path: Path) -> None:
    filesystem = DeferredUnlinkFilesystem()
    path = tmp_path / "0000000000000001.pack"
    path.write_bytes(b"x")
    filesystem.hold()
    filesystem.unlink(path)
    path.unlink()
    filesystem.release()


def test_held_file_is_not_overwritten_by_another_use(tmp_path: Path) -> None:
    filesystem = DeferredUnlinkFilesystem()
    path, spare = tmp_path / "0000000000000001.log", tmp_path / "spare.log"
    path.write_bytes(b"x")
    filesystem.hold()
    assert not filesystem.recycle(path, spare)
    assert path.exists()
    filesystem.release()
    assert filesystem.recycle(path, spare)
    assert spare.read_bytes() == b"x"
