"""Checkpoints of `acid`: the journal's records are applied to the shards while further batches are written."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from pathlib import Path

from tests.storage.acid.driver import MIB, Driver, messages_of, open_acid, save_all
from tests.waiting import wait_until


def test_segment_begun_during_a_checkpoint_is_read_by_the_next_one(tmp_path: Path) -> None:
    """The next batch is written, into a new segment, before the checkpoint of the previous batch begins."""
    with closing(open_acid(tmp_path, 1, save_after_s=1e6, segment_bytes=1)) as store:
        driver = Driver([store])
        driver.recover(store)
        stream = driver.create("stream", [b"first"])
        driver.commit()
        journal = store._journal
        assert journal is not None
        wait_until(lambda: not journal.wants_next, what="the next segment exists")
        driver.append(stream, [b"second"])
        batch, driver.queue = driver.queue, []
        store.write(batch)
        assert journal.segments[-1].first_lsn == 2
        save_all(store)
        store.publish(batch)
        save_all(store)
        assert store.refusal() is None
        assert messages_of(store, stream) == [b"first", b"second"]


def test_checkpoint_of_a_large_append_reads_it_once_and_does_not_copy_it(tmp_path: Path) -> None:
    """A copy of 60 MiB in one call holds the interpreter, and so delays all clients, for 50 ms."""
    message = bytes(range(256)) * (16 * MIB // 256)
    with closing(open_acid(tmp_path, 1, save_after_s=1e6, hot_tail_bytes=64 * MIB)) as store:
        driver = Driver([store])
        driver.recover(store)
        stream = driver.create("stream")
        driver.append(stream, [message])
        driver.commit()
        tracemalloc.start()
        try:
            save_all(store)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < len(message) + 2 * MIB
    with closing(open_acid(tmp_path, 1)) as store:
        catalog = Driver([store])
        catalog.recover(store)
        assert messages_of(store, catalog.catalog.by_name["stream"]) == [message]
