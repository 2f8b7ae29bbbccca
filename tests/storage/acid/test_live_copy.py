"""A copy taken while a server writes is a complete, consistent state, no older than the request for the copy."""

from __future__ import annotations

import base64
import operator
import os
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headwater.core.catalog import Catalog, StreamState
from headwater.storage.acid import offline
from headwater.storage.acid.layout import read_manifest, read_mark
from headwater.storage.filesystem import Filesystem, RealFilesystem
from headwater.storage.interface import Committed, StorageError
from headwater.storage.journal.replay import copy_journal
from headwater.storage.memory import MemoryStorage
from headwater.storage.offline.backup import take_backup
from headwater.storage.offline.check import check
from headwater.storage.offline.families import tools_of
from headwater.storage.offline.interface import CopyFile
from tests.storage.acid.crash_child import SHARDS, decode_batch
from tests.storage.acid.driver import Driver, messages_of, open_acid, state_of
from tests.waiting import wait_until


def lines_of(said: Path) -> list[str]:
    text = said.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def moment_of(copy: Path, lines: list[str]) -> int:
    """Return the number of batches in a copy; fail if it is not exactly a prefix of all batches."""
    store = open_acid(copy, SHARDS, 2**26, 2**20)
    with closing(store):
        found: Catalog[StreamState] = Catalog(StreamState)
        for state in store.recover():
            found.apply(state)
        catalog: Catalog[StreamState] = Catalog(StreamState)
        memory = MemoryStorage()
        batches = [line.removeprefix("try ") for line in lines if line.startswith("try ")]
        for number, text in enumerate(batches, 1):
            batch = [Committed(record, removed) for record, removed in decode_batch(base64.b64decode(text))]
            for record, _ in batch:
                catalog.apply(record)
            memory.publish(batch)
            if catalog.by_id.keys() == found.by_id.keys() and state_of(catalog) == state_of(found):
                assert all(messages_of(store, stream) == messages_of(memory, stream) for stream in catalog)
                return number
    raise AssertionError("the copy does not match any state of the store")


def acks_in(said: Path) -> int:
    return sum(line.startswith("ack") for line in lines_of(said))


def acks_of(process: subprocess.Popen[bytes], said: Path) -> int:
    assert process.poll() is None
    return acks_in(said)


def copy_live(home: Path, count: int) -> list[tuple[int, Path]]:
    """Take copies of a store in use, each with the number of batches acknowledged when it was requested."""
    said = home / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.storage.acid.crash_child", str(home / "store"), "1", "{}", "0"],
            stdout=output,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    asked: list[tuple[int, Path]] = []
    try:
        for number in range(count):
            wanted = 20 * (number + 1)
            acknowledged = wait_until(partial(acks_of, process, said), partial(operator.le, wanted), what="acks")
            take_backup(home / "store", home / f"copy-{number}")
            asked.append((acknowledged, home / f"copy-{number}"))
            assert tools_of(home / "store").live_parts(RealFilesystem(), home / "store")["used_bytes"] > 0
    finally:
        process.kill()
        process.wait(60)
    return asked


def test_a_live_copy_is_the_store_at_one_moment(tmp_path: Path, long: bool) -> None:
    for acknowledged, copy in copy_live(tmp_path, 40 if long else 8):
        assert moment_of(copy, lines_of(tmp_path / "said")) >= acknowledged
        assert list(check(copy)) == []


def has_wrong_copy(home: Path) -> bool:
    home.mkdir()
    for acknowledged, copy in copy_live(home, 2):
        try:
            assert moment_of(copy, lines_of(home / "said")) >= acknowledged
        except (AssertionError, StorageError):
            return True
    return False


def test_copy_with_a_journal_older_than_its_shards_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def journal_first(filesystem: Filesystem, source: Path, target: Path, copy_file: CopyFile) -> None:
        """Copy the journal and its mark, and the shards when a checkpoint has changed them."""
        root = source / "acid"
        manifest = read_manifest(root)
        mark = read_mark(root, manifest)
        filesystem.make_directory(target / "log")
        copy_journal(filesystem, source / "log", target / "log", mark.segment, copy_file)
        said = source.parent / "said"
        most = acks_in(said) + 2_000
        # On a busy machine the writer can be far ahead of checkpoints, so that one takes very long.
        wait_until(
            lambda: read_mark(root, manifest) != mark or acks_in(said) >= most, what="a checkpoint, or many acks"
        )
        monkeypatch.setattr(offline, "copy_journal", lambda *_: None)
        copy_once(filesystem, source, target, copy_file)
        monkeypatch.setattr(offline, "copy_journal", copy_journal)

    copy_once = offline._copy_once
    monkeypatch.setattr(offline, "_copy_once", journal_first)
    assert any(has_wrong_copy(tmp_path / str(attempt)) for attempt in range(30))


def test_copy_restarts_when_the_journal_is_trimmed_and_finally_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_acid(tmp_path / "store", 2)
    driver = Driver([store])
    driver.recover(store)
    driver.create("stream", [b"message"])
    driver.commit()
    store.close()
    real, tries = copy_journal, 0

    def trimmed(*arguments: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries % 4:
            raise FileNotFoundError("a segment that was trimmed")
        return real(*arguments)

    monkeypatch.setattr(offline, "copy_journal", trimmed)
    take_backup(tmp_path / "store", tmp_path / "copy")
    assert tries == 4
    assert list(check(tmp_path / "copy")) == []
    monkeypatch.setattr(offline, "TRIES", 3)
    tries = 0
    with pytest.raises(StorageError, match="too busy"):
        take_backup(tmp_path / "store", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_copy_requires_an_empty_target(tmp_path: Path) -> None:
    for name in ("one", "two"):
        store = open_acid(tmp_path / name, 2, 2**26, 2**20)
        Driver([store]).recover(store)
        store.close()
    with pytest.raises(StorageError, match="already has a store"):
        take_backup(tmp_path / "one", tmp_path / "two")
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "precious").write_text("mine")
    with pytest.raises(StorageError, match="precious"):
        take_backup(tmp_path / "one", tmp_path / "three")
