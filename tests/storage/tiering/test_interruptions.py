"""Processes that end at any request to the object store, performed or not: nothing acknowledged is lost, and every
`HEAD` refers to existing objects."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.packs.manifest import NAME, Manifest
from headwater.storage.tiering.claimed_prefix import ClaimedPrefix
from headwater.storage.tiering.objects import Objects, ObjectStoreError
from headwater.storage.tiering.uploader import pack_key
from tests.storage.acid.driver import messages_of
from tests.storage.tiering.driving import TieredRun, opened
from tests.storage.tiering.objects import SwitchedObjects, memory_objects

MESSAGES = [b"first" * 1000, b"second" * 1000]


class Interrupted(SwitchedObjects):
    """Requests from number `last` get no response; that request itself is performed or not."""

    last = 10**9
    is_done = False

    @contextmanager
    def answering(self, last: int, *, is_done: bool) -> Iterator[None]:
        self.asked, self.last, self.is_done = [], last, is_done
        try:
            yield
        finally:
            self.last = 10**9

    def _ask(self, *what: Any) -> None:
        self.asked.append(what)
        if len(self.asked) > self.last + self.is_done:
            raise ObjectStoreError(errno.EIO, "no answer")

    def replace(self, key: str, data: bytes, tag: str) -> str:
        found = super().replace(key, data, tag)
        self._lose_answer()
        return found

    def create(self, key: str, data: bytes) -> str:
        found = super().create(key, data)
        self._lose_answer()
        return found

    def put(self, key: str, data: bytes | Path) -> None:
        super().put(key, data)
        self._lose_answer()

    def _lose_answer(self) -> None:
        if self.is_done and len(self.asked) > self.last:
            raise ObjectStoreError(errno.EIO, "the answer was lost")


def check_head(objects: Objects, directory: Path) -> None:
    """Check that everything that `HEAD` refers to exists."""
    head = ClaimedPrefix(objects).head
    if head is None or not head.parts:
        return
    parts = [objects.get(part.key) for part in head.parts]
    directory.mkdir()
    (directory / NAME).write_bytes(b"".join(part.data for part in parts if part is not None))
    manifest = Manifest(RealFilesystem(), directory)
    assert bool(list(manifest.load())) == (head.lsn > 0), "the first one is empty"
    stored = objects.sizes("packs/")
    assert {pack_key(info.number): info.size for info in manifest.packs.values()}.items() <= stored.items()


def append_all(run: TieredRun, done: list[bytes]) -> None:
    for message in MESSAGES:
        stream = run.driver.catalog.by_name.get("s") or run.driver.create("s")
        run.driver.append(stream, [message])
        run.save()
        done.append(message)
        with suppress(ObjectStoreError):
            run.uploader.step()


@pytest.mark.parametrize("is_done", [False, True], ids=["not done", "answer lost"])
def test_interruption_at_any_request_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    # The test itself makes the uploader's steps, so that the requests are the same in each round.
    monkeypatch.setattr("headwater.storage.tiering.uploader.Uploader._run", lambda _: None)
    last = 0
    while True:
        objects = Interrupted(memory_objects())
        directory = tmp_path / f"data-{last}"
        done: list[bytes] = []
        with objects.answering(last, is_done=is_done), suppress(StorageError), opened(objects, directory) as run:
            append_all(run, done)
        was_reached = len(objects.asked) > last
        check_head(objects, tmp_path / f"head-{last}")
        with opened(objects, directory, cache_bytes=0) as run:
            run.uploader.step()
            run.tidy()
            for stream in run.driver.catalog.by_name.values():
                assert messages_of(run.storage, stream) == done
            assert bool(run.driver.catalog.by_name) == bool(done)
            again = run.driver.create("again", [b"x"])
            run.save()
            run.uploader.step()
            assert run.uploader.is_current
            assert messages_of(run.storage, again) == [b"x"]
        check_head(objects, tmp_path / f"head-again-{last}")
        if not was_reached:
            break
        last += 1
    assert last >= 10, "there were many requests"


def test_lost_response_to_a_commit_is_not_mistaken_for_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.storage.tiering.uploader.Uploader._run", lambda _: None)
    objects = Interrupted(memory_objects())
    with opened(objects, tmp_path / "data") as run:
        stream = run.driver.create("s", [b"x"])
        run.save()
        run.uploader.step()
        run.driver.append(stream, [b"y"])
        run.save()
        with objects.answering(2, is_done=True), pytest.raises(ObjectStoreError):
            run.uploader.step()
        assert objects.asked[-1][0] == "replace"
        # There is a newer manifest now, so the content differs.
        run.driver.append(stream, [b"z"])
        run.save()
        run.uploader.step()
        assert run.uploader.is_current
        head = ClaimedPrefix(objects).head
        assert head is not None
        assert head.lsn == run.storage._unsaved.lsn


def test_objects_of_a_commit_with_a_lost_response_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.storage.tiering.uploader.Uploader._run", lambda _: None)
    objects = Interrupted(memory_objects())
    with opened(objects, tmp_path / "data", grace_s=0.0) as run:
        stream = run.driver.create("s", [b"x"])
        run.save()
        run.uploader.step()
        run.driver.append(stream, [b"y"])
        run.save()
        with objects.answering(2, is_done=True), pytest.raises(ObjectStoreError):
            run.uploader.step()
        named = ClaimedPrefix(objects).head
        assert named is not None
        assert run.uploader._done is not run.uploader._state
        # There is a newer manifest now, and the process dies before it can replace HEAD.
        run.driver.append(stream, [b"z"])
        run.save()
        with objects.answering(2, is_done=False), pytest.raises(ObjectStoreError):
            run.uploader.step()
        assert objects.asked[-1] == ("replace", "HEAD")
        assert ClaimedPrefix(objects).head == named
        assert {part.key: part.size for part in named.parts}.items() <= objects.sizes("manifest/").items()
        # Objects of attempts that HEAD does not refer to are deleted.
        run.uploader.step()
        run.uploader.step()
        head = ClaimedPrefix(objects).head
        assert head is not None
        assert objects.sizes("manifest/") == {part.key: part.size for part in head.parts}
