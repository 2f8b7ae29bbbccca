"""Rewriting packs does not leave the copied pages mapped in the process."""

from __future__ import annotations

import re
from pathlib import Path

from headwater.core.records import Create
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.journaled_store import StoreSettings
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
