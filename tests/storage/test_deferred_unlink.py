"""Files that are held stay, however many hold them; what is still being made goes at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.storage.deferred_unlink import DeferredUnlinkFilesystem


def test_a_held_file_goes_with_the_last_hold(tmp_path: Path) -> None:
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


def test_without_a_hold_a_file_goes_at_once(tmp_path: Path) -> None:
    filesystem = DeferredUnlinkFilesystem()
    path = tmp_path / "0000000000000001.log"
    path.write_bytes(b"x")
    filesystem.hold()
    filesystem.release()
    filesystem.unlink(path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["MANIFEST.new", "0123456789abcdef.part"])
def test_a_name_that_is_used_again_is_free_at_once(tmp_path: Path, name: str) -> None:
    filesystem = DeferredUnlinkFilesystem()
    (tmp_path / name).write_bytes(b"x")
    filesystem.hold()
    filesystem.unlink(tmp_path / name)
    filesystem.create(tmp_path / name).close()
    filesystem.release()
    assert (tmp_path / name).exists()


def test_a_file_that_is_gone_anyway_is_no_trouble(tmp_path: Path) -> None:
    filesystem = DeferredUnlinkFilesystem()
    path = tmp_path / "0000000000000001.pack"
    path.write_bytes(b"x")
    filesystem.hold()
    filesystem.unlink(path)
    path.unlink()
    filesystem.release()
