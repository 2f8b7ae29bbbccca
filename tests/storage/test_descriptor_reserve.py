"""The reserve of descriptors is closed with its store."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from headwater.config import StorageSettings
from headwater.engine.open_storage import open_store
from headwater.storage.descriptor_reserve import RESERVE
from headwater.storage.interface import StorageError


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/dev/fd").iterdir()))


def test_closed_stores_leave_no_descriptors_behind(tmp_path: Path) -> None:
    settings = StorageSettings(mode="file-durable", data_dir=tmp_path / "data")
    before = descriptors()
    for _ in range(3):
        store = open_store(settings)
        assert descriptors() >= before + RESERVE
        store.storage.close()
        del store
    (tmp_path / "file").touch()
    for _ in range(3):
        with pytest.raises(StorageError):
            open_store(StorageSettings(mode="file-durable", data_dir=tmp_path / "file"))
    assert descriptors() <= before
