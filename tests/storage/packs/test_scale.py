"""Many streams: memory per stream, startup time, and maintenance that does not block the loop."""

from __future__ import annotations

import gc
import time
import tracemalloc
from pathlib import Path
from random import Random

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Append, Create, Image
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import Committed
from headwater.storage.journaled_store import StoreSettings
from headwater.storage.packs.pack_store import file_storage
from tests.waiting import wait_until

STREAM_MAX_BYTES = 2048
BOOT_MAX_S_PER_100_000 = 20.0
"""A generous limit, because test machines are shared. On an idle machine it takes about 2 s."""


def fill(path: Path, streams: int) -> list[int]:
    """Fill a store with streams that have a few messages and a producer each, all saved."""
    storage = file_storage(RealFilesystem(), path, durable=False, settings=StoreSettings(reserve_bytes=0))
    catalog: Catalog[StreamState] = Catalog(StreamState)
    list(storage.recover())

    def image(stream_id: int) -> Image | None:
        return catalog.by_id[stream_id].image()

    random = Random(1)
    ids = [random.getrandbits(63) | 1 for _ in range(streams)]
    for start in range(0, streams, 500):
        batch = [
            Committed(Create(id_, f"tenant-{id_ % 97}/events-{id_:x}", 1, "text/plain"))
            for id_ in ids[start : start + 500]
        ]
        batch += [
            Committed(Append(id_, 1_700_000_000_000, 0, 0, b"0123456789" * 5, (10,) * 5, f"producer-{id_ % 7}", 0, 0))
            for id_ in ids[start : start + 500]
        ]
        for committed in batch:
            catalog.apply(committed.record)
        storage.write(batch)
        storage.publish(batch)
        storage.maintain(image)
    storage.checkpoint_soon()

    def held() -> int:
        storage.maintain(image)
        return storage.usage().memory_bytes

    wait_until(held, lambda size: size == 0, every_s=0.001)
    storage.close()
    return ids


def test_idle_streams_are_cheap_and_start_fast(tmp_path: Path, long: bool) -> None:
    streams = 100_000 if long else 5_000
    ids = fill(tmp_path, streams)
    gc.collect()
    tracemalloc.start()
    storage = file_storage(RealFilesystem(), tmp_path, durable=False, settings=StoreSettings(reserve_bytes=0))
    catalog: Catalog[StreamState] = Catalog(StreamState)
    for record in storage.recover():
        catalog.apply(record)
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(catalog) == streams
    assert used / streams <= STREAM_MAX_BYTES, f"{used / streams:.0f} bytes for an idle stream"
    for id_ in Random(2).sample(ids, 200):
        assert b"".join(storage.read(id_, 0, 50)) == b"0123456789" * 5
    storage.close()
    started = time.process_time()
    storage = file_storage(RealFilesystem(), tmp_path, durable=False, settings=StoreSettings(reserve_bytes=0))
    catalog = Catalog(StreamState)
    for record in storage.recover():
        catalog.apply(record)
    seconds = time.process_time() - started
    storage.close()
    assert seconds <= BOOT_MAX_S_PER_100_000 * max(streams, 10_000) / 100_000, f"{seconds:.1f} s to start"


def test_few_files_however_many_streams(tmp_path: Path) -> None:
    fill(tmp_path, 3_000)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) <= 10
