"""A full disk or map: writes are refused early or fail permanently, reads still work, and nothing is lost."""

from __future__ import annotations

import resource
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headwater.storage.acid import shard_store
from headwater.storage.acid.shard import Reached, Shard
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError, WriteFailedError
from headwater.storage.journaled_store import JournaledStorage
from tests.storage.acid.driver import Driver, messages_of, open_acid, open_lazy, save_all
from tests.waiting import LIMIT_S

MESSAGE = b"m" * 20_000


def append_until_refused(driver: Driver, storage: JournaledStorage) -> list[bytes]:
    """Append as the engine does until the store refuses; return what was acknowledged."""
    stream = driver.create("stream")
    sent: list[bytes] = []
    while storage.refusal() is None:
        assert len(sent) < 10_000, "the store never refused"
        driver.append(stream, [MESSAGE])
        driver.commit()
        sent.append(MESSAGE)
        save_all(storage)
    return sent


def append_until_failed(driver: Driver) -> list[bytes]:
    """Append until the store fails, ignoring refusals; return what was acknowledged."""
    stream = driver.catalog.by_name.get("stream") or driver.create("stream")
    sent: list[bytes] = []
    try:
        while len(sent) < 10_000:
            driver.append(stream, [MESSAGE])
            driver.commit()
            sent.append(MESSAGE)
    except WriteFailedError:
        return sent
    raise AssertionError("the store never refused")


def test_nearly_full_map_refuses_writes_before_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_store, "CHECK_SPACE_S", 0.0)
    storage = open_acid(tmp_path, 1, 2**22, 1, save_after_s=0.0)
    driver = Driver([storage])
    driver.recover(storage)
    sent = append_until_refused(driver, storage)
    assert "storage.acid_map_bytes" in (storage.refusal() or "")
    stream = driver.catalog.by_name["stream"]
    assert messages_of(storage, stream) == sent

    driver.delete(stream)
    driver.commit()
    save_all(storage)
    storage.maintain(lambda _: None)
    assert storage.refusal() is None, "deletion frees space"
    driver.create("next", [MESSAGE])
    driver.commit()
    storage.close()


def test_full_map_stops_writes_and_loses_nothing(tmp_path: Path) -> None:
    storage = open_acid(tmp_path, 1, 2**21, 1, save_after_s=0.0)
    driver = Driver([storage])
    driver.recover(storage)
    sent = append_until_failed(driver)
    assert "storage.acid_map_bytes" in (storage.refusal() or "")
    stream = driver.catalog.by_name["stream"]
    pieces = storage.read(stream.id, 0, len(sent) * len(MESSAGE))
    assert b"".join(pieces) == b"".join(sent), "reads still work"
    driver.document("key", b"value")
    with pytest.raises(WriteFailedError):
        driver.commit()
    storage.close()

    with (
        closing(open_acid(tmp_path, 1, 2**21, 1)) as same,
        pytest.raises(StorageError, match=r"storage\.acid_map_bytes"),
    ):
        list(same.recover())
    larger = open_acid(tmp_path, 1, 2**26, 1)
    driver = Driver([larger])
    driver.recover(larger)
    found = messages_of(larger, driver.catalog.by_name["stream"])
    assert found[: len(sent)] == sent
    assert len(found) <= len(sent) + 1, "at most the append that failed"
    larger.close()


def test_failed_write_is_never_retried(tmp_path: Path) -> None:
    """The kernel refuses to let the file grow, as on a full disk: nothing is acknowledged after that."""
    storage = open_lazy(tmp_path, 1, 2**26)
    driver = Driver([storage])
    driver.recover(storage)
    stream = driver.create("stream", [MESSAGE])
    driver.commit()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        sent = [MESSAGE, *append_until_failed(driver)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "Writing" in (storage.refusal() or "")
    assert ".log failed: [Errno 27] File too large" in (storage.refusal() or "")
    # Writes stay refused when there is space again, because the outcome of the failed write is unknown.
    driver.document("key", b"value")
    with pytest.raises(WriteFailedError):
        driver.commit()
    assert b"".join(storage.read(stream.id, 0, len(sent) * len(MESSAGE))) == b"".join(sent)
    storage.close()

    again = open_acid(tmp_path, 1, 2**26, 2**24)
    driver = Driver([again])
    driver.recover(again)
    assert driver.catalog.documents == {}
    found = messages_of(again, driver.catalog.by_name["stream"])
    assert found[: len(sent)] == sent
    assert len(found) <= len(sent) + 1
    again.close()


def test_nearly_full_disk_refuses_writes_until_there_is_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_store, "CHECK_SPACE_S", 0.0)
    storage = open_acid(tmp_path, 1, 2**26, 2**20)
    list(storage.recover())
    storage.maintain(lambda _: None)
    assert storage.refusal() is None
    monkeypatch.setattr(RealFilesystem, "free_bytes", lambda *_: 2**20)
    storage.maintain(lambda _: None)
    assert "has less than 128 MiB left" in (storage.refusal() or "")
    monkeypatch.undo()
    monkeypatch.setattr(shard_store, "CHECK_SPACE_S", 0.0)
    storage.maintain(lambda _: None)
    assert storage.refusal() is None
    storage.close()


def test_no_write_waits_while_shards_are_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write waits only for the journal: each completes while the shards are held. The store reports busy in time."""
    allowed = threading.Event()
    apply = Shard.apply

    def held_apply(shard: Shard, *arguments: Any) -> list[Reached]:
        assert allowed.wait(LIMIT_S), "a write waited for the shard"
        return apply(shard, *arguments)

    monkeypatch.setattr(Shard, "apply", held_apply)
    storage = open_acid(tmp_path, 1, 2**24, 1, save_after_s=0.0, busy_floor_bytes=40 * len(MESSAGE))
    driver = Driver([storage])
    driver.recover(storage)
    stream = driver.create("stream")
    driver.commit()
    while storage.busy() is None:
        driver.append(stream, [MESSAGE])
        driver.commit()
        assert stream.message_index < 10_000, "the store is never busy"
    allowed.set()
    save_all(storage)
    assert storage.busy() is None
    storage.close()


def test_saved_bytes_stay_cached_within_the_limit_and_the_oldest_are_evicted_first(tmp_path: Path) -> None:
    storage = open_acid(tmp_path, 2, 2**26, 50 * len(MESSAGE), save_after_s=0.0)
    driver = Driver([storage])
    driver.recover(storage)
    stream = driver.create("stream")
    for _ in range(60):
        driver.append(stream, [MESSAGE])
        driver.commit()
        save_all(storage)
        assert storage._unsaved.bytes == 0
        assert storage.usage().memory_bytes <= 25 * len(MESSAGE)
    tail = storage._streams[stream.id].tail
    assert tail is not None
    assert len(tail.ends) >= 15, "the newest messages are read from memory"
    assert messages_of(storage, stream) == [MESSAGE] * 60
    driver.delete(stream)
    driver.commit()
    save_all(storage)
    assert storage.usage() == (0, 0)
    storage.close()
