"""Checkpoints and rewrites of packs need little memory, and copy little in one call."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from headwater.core.records import Append, Create
from headwater.storage.filesystem import Bytes, FileAppender, RealFilesystem, write_whole
from headwater.storage.journaled_store import JournaledStorage, StoreSettings
from headwater.storage.packs import pack
from headwater.storage.packs.compaction import rewrite_packs
from headwater.storage.packs.pack_set import Rewrite
from headwater.storage.packs.pack_store import file_storage
from tests.storage.packs.test_threads import Server, maintain_until
from tests.storage.simulation import packs_of

MIB = 1024 * 1024
STREAMS = 40


def mapped_bytes() -> int:
    """The size of file pages mapped into this process."""
    [kib] = re.findall(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


def test_rewrite_frees_pages_as_it_proceeds(tmp_path: Path) -> None:
    settings = StoreSettings(reserve_bytes=0, fanout=10**6, big_bytes=64 * MIB)
    storage = file_storage(RealFilesystem(), tmp_path, durable=False, settings=settings)
    server = Server(storage)
    for stream_id in range(1, STREAMS + 1):
        create = Create(stream_id, f"s{stream_id}", 1, "text/plain", payload=b"x" * MIB, lengths=(MIB,))
        server.catalog.apply(create)
        server.commit([create], set())
    storage.checkpoint_soon()
    maintain_until(storage, server.image, lambda: storage.parts()["packs"] == 1)
    context = packs_of(storage)._context
    assert context is not None
    [info] = packs_of(storage).pack_set._infos.values()
    before = mapped_bytes()
    job = rewrite_packs(context, Rewrite((info,), 1))
    most = max(mapped_bytes() for _ in job)
    assert most - before < STREAMS * MIB // 4
    storage.close()


def test_index_of_many_small_messages_is_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of all ends would take 40 bytes per message, and hold the interpreter while it is converted and freed."""
    largest_write = 0

    def watched(file: FileAppender, data: Bytes) -> None:
        nonlocal largest_write
        largest_write = max(largest_write, len(data))
        write_whole(file, data)

    monkeypatch.setattr(pack, "write_whole", watched)
    messages = 500_000
    settings = StoreSettings(reserve_bytes=0, fanout=10**6, hot_tail_bytes=10**9, segment_bytes=2**27, big_bytes=2**30)
    storage = file_storage(RealFilesystem(), tmp_path, durable=False, settings=settings)
    server = Server(storage)
    create = Create(1, "s", 1, "text/plain")
    server.catalog.apply(create)
    server.commit([create], set())
    for number in (1, 2):
        stream = server.catalog.by_id[1]
        for at_ms in range(20):
            append = Append(1, at_ms, stream.message_index, stream.byte_position, b"x" * 25_000, (1,) * 25_000)
            server.catalog.apply(append)
            server.commit([append], set())
        assert stream.message_index == number * messages
        storage.checkpoint_soon()
        with memory_limit(20 * messages):
            maintain_until(storage, server.image, partial(has_packs, storage, number))
    context = packs_of(storage)._context
    assert context is not None
    infos = tuple(packs_of(storage).pack_set._infos.values())
    with memory_limit(20 * 2 * messages):
        for _ in rewrite_packs(context, Rewrite(infos, 1)):
            pass
    assert largest_write < 2 * MIB
    storage.close()


def test_store_allocates_no_more_than_it_counts(tmp_path: Path) -> None:
    """Under appends of 16 KiB to 200 streams, with checkpoints and merges. `memory_bytes` limits what clients can use,
    so it must be what is really allocated."""
    hot_bytes, batch = 4 * MIB, 50
    settings = StoreSettings(
        reserve_bytes=0, hot_tail_bytes=hot_bytes, segment_bytes=2 * MIB, busy_floor_bytes=0, fanout=3
    )
    storage = file_storage(RealFilesystem(), tmp_path, durable=False, settings=settings)
    server = Server(storage)
    creates: list[Create | Append] = [Create(number, f"s{number}", 1, "text/plain") for number in range(1, 201)]
    for create in creates:
        server.catalog.apply(create)
    server.commit(creates, set())
    payload = b"p" * 16 * 1024
    with memory_limit(3 * hot_bytes + 2 * batch * len(payload)):
        for number in range(30):
            ids = range(1 + number * batch % 200, 1 + number * batch % 200 + batch)
            server.commit([server.append(stream_id, payload) for stream_id in ids], set())
            maintain_until(storage, server.image, lambda: not storage.busy())
    assert storage.usage().payload_bytes == 30 * batch * len(payload)
    assert hot_bytes // 2 < server.peak_bytes < 2 * hot_bytes + batch * len(payload)
    storage.close()


def has_packs(storage: JournaledStorage, number: int) -> bool:
    return storage.parts()["packs"] == number


@contextmanager
def memory_limit(limit: int) -> Iterator[None]:
    """Assert that no more than this is allocated at any time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit, (peak, limit)
