"""A copy taken while a server writes is the store at one moment: no earlier than when it was asked for, and whole."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from lmdb import Transaction

from headwater.core.catalog import Catalog, StreamState
from headwater.storage.acid import AcidStorage, live_copy
from headwater.storage.acid.check import check, stats
from headwater.storage.acid.journal import Journal, Mark
from headwater.storage.acid.live_copy import copy_store
from headwater.storage.acid.shard import Shard
from headwater.storage.interface import Committed, StorageError
from headwater.storage.memory import MemoryStorage
from tests.storage.acid.driving import Driver, messages_of, state_of
from tests.storage.acid.victim import SHARDS, decode_batch


def lines_of(said: Path) -> list[str]:
    text = said.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def moment_of(copy: Path, lines: list[str]) -> int:
    """How many batches a copy holds: exactly the first so many, or it is no moment of the store at all."""
    store = AcidStorage(copy, SHARDS, 2**26, 2**20)
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
    raise AssertionError("the copy is the store at no moment")


def copy_live(home: Path, count: int) -> list[tuple[int, Path]]:
    """Copies of a store in use, each with how many batches had been acknowledged when it was asked for."""
    said = home / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.storage.acid.victim", str(home / "store"), "1", "{}", "0"],
            stdout=output,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    asked: list[tuple[int, Path]] = []
    try:
        for number in range(count):
            wanted = 20 * (number + 1)
            while sum(line.startswith("ack") for line in lines_of(said)) < wanted:
                assert process.poll() is None
                time.sleep(0.005)
            acknowledged = sum(line.startswith("ack") for line in lines_of(said))
            copy_store(home / "store", home / f"copy-{number}")
            asked.append((acknowledged, home / f"copy-{number}"))
            assert stats(home / "store").streams > 0
    finally:
        process.kill()
        process.wait(10)
    return asked


@pytest.mark.timeout(300)
def test_a_live_copy_is_the_store_at_one_moment(tmp_path: Path, long: bool) -> None:
    for acknowledged, copy in copy_live(tmp_path, 40 if long else 8):
        assert moment_of(copy, lines_of(tmp_path / "said")) >= acknowledged
        assert list(check(copy)) == []


def test_a_copy_of_several_moments_would_be_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_it_comes(transactions: ExitStack, shards: list[Shard], journal: Journal) -> list[Transaction[bytes]]:
        views = []
        for environment in [*(shard.environment for shard in shards), journal.environment]:
            views.append(transactions.enter_context(environment.begin()))
            time.sleep(0.02)
        return views

    monkeypatch.setattr(live_copy, "_same_moment", as_it_comes)
    found_out = 0
    for acknowledged, copy in copy_live(tmp_path, 6):
        try:
            assert moment_of(copy, lines_of(tmp_path / "said")) >= acknowledged
        except (AssertionError, StorageError):
            found_out += 1
    assert found_out > 0


def test_a_copy_that_cannot_see_one_moment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AcidStorage(tmp_path / "store", 2, 2**26, 2**20)
    Driver([store]).recover(store)
    store.close()
    marks = iter(range(10**6))
    monkeypatch.setattr(Journal, "read_mark", lambda *_: Mark(next(marks), (0, 0)))
    with pytest.raises(StorageError, match="too busy"):
        copy_store(tmp_path / "store", tmp_path / "copy")
    assert live_copy.TRIES > 1


def test_a_copy_needs_an_empty_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        store = AcidStorage(tmp_path / name, 2, 2**26, 2**20)
        Driver([store]).recover(store)
        store.close()
    with pytest.raises(StorageError, match="holds a store already"):
        copy_store(tmp_path / "one", tmp_path / "two")
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "precious").write_text("mine")
    with pytest.raises(StorageError, match="precious"):
        copy_store(tmp_path / "one", tmp_path / "three")
