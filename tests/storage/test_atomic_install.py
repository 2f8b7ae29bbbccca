"""Installation of a store is atomic: either it is complete, or a start does not accept the directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headwater.storage.directory import open_directory
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.offline.atomic_install import UNFINISHED, atomic_install


def build(place: Path, text: str) -> None:
    open_directory(RealFilesystem(), place, "log").close()
    (place / "log").mkdir()
    (place / "log" / "content").write_text(text)
    (place / "MANIFEST").write_text(text)


def arrive(target: Path, text: str, *, replace: bool = False) -> None:
    with atomic_install(target, replace=replace) as place:
        build(place, text)


def content(target: Path) -> str:
    open_directory(RealFilesystem(), target, "log", create=False).close()
    assert not (target / UNFINISHED).exists()
    assert (target / "MANIFEST").read_text() == (target / "log" / "content").read_text()
    return (target / "MANIFEST").read_text()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_new_or_an_empty_directory_is_filled(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        (tmp_path / "t").mkdir()
    arrive(tmp_path / "t", "one")
    assert content(tmp_path / "t") == "one"


def test_failed_build_leaves_no_files(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_install(tmp_path / "t") as place:
            build(place, "one")
            raise StorageError("no more")

    with pytest.raises(StorageError, match="no more"):
        fail()
    assert not (tmp_path / "t").exists()


def test_files_of_an_interrupted_installation_are_removed(tmp_path: Path) -> None:
    place = tmp_path / "t" / UNFINISHED
    place.mkdir(parents=True)
    build(place, "half")
    arrive(tmp_path / "t", "one")
    assert content(tmp_path / "t") == "one"


class Killed(BaseException):
    """The process ends here, without any clean-up."""


@pytest.mark.parametrize("had_one", [False, True])
@pytest.mark.parametrize("allowed", range(3))
def test_directory_is_not_a_store_after_a_kill_between_any_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_one: bool, allowed: int
) -> None:
    """MANIFEST, log, FORMAT: with fewer than all three moved in, every start refuses the directory."""
    target = tmp_path / "t"
    if had_one:
        arrive(target, "old")
    with monkeypatch.context() as patch:
        real_replace, left = RealFilesystem.replace, [allowed]

        def replace(self: RealFilesystem, source: Path, to: Path) -> None:
            # Renames of format files while the new store is built are not part of the installation.
            if to.parent.name != UNFINISHED:
                if not left[0]:
                    patch.setattr(shutil, "rmtree", lambda *_, **__: None)
                    raise Killed
                left[0] -= 1
            real_replace(self, source, to)

        patch.setattr(RealFilesystem, "replace", replace)
        with pytest.raises(Killed):
            arrive(target, "new", replace=True)
    assert (target / UNFINISHED).exists()
    for create in (False, True) if allowed else (False,):
        with pytest.raises(StorageError, match="not a Headwater data directory"):
            open_directory(RealFilesystem(), target, "log", create=create)
    arrive(target, "again")
    assert content(target) == "again"


def test_store_is_replaced_only_if_requested(tmp_path: Path) -> None:
    arrive(tmp_path / "t", "one")
    with pytest.raises(StorageError, match="already has a store"):
        arrive(tmp_path / "t", "two")
    assert content(tmp_path / "t") == "one"
    arrive(tmp_path / "t", "two", replace=True)
    assert content(tmp_path / "t") == "two"


@pytest.mark.parametrize("has_store", [False, True])
def test_files_of_other_programs_are_never_replaced(tmp_path: Path, has_store: bool) -> None:
    if has_store:
        arrive(tmp_path / "t", "one")
    else:
        (tmp_path / "t").mkdir()
    (tmp_path / "t" / "precious").write_text("mine")
    with pytest.raises(StorageError, match="precious"):
        arrive(tmp_path / "t", "two", replace=True)
    assert (tmp_path / "t" / "precious").read_text() == "mine"


def test_a_store_in_use_is_not_replaced(tmp_path: Path) -> None:
    arrive(tmp_path / "t", "one")
    used = open_directory(RealFilesystem(), tmp_path / "t", "log")
    with pytest.raises(StorageError, match="in use"):
        arrive(tmp_path / "t", "two", replace=True)
    used.close()
    assert content(tmp_path / "t") == "one"
