"""Compare the engine with the model over the real stores, with restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from headwater.engine.commit_placement import CommitMode
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import Storage
from headwater.storage.journaled_store import StoreSettings
from headwater.storage.packs.pack_store import file_storage
from tests.model.directory_backing import DirectoryBacking
from tests.model.machine import machine
from tests.storage.acid.driver import open_acid

TINY = StoreSettings(segment_bytes=4096, hot_tail_bytes=256)
"""Small enough that one run starts new segments, merges packs and reads from files."""


def log_store(directory: Path) -> Storage:
    return file_storage(RealFilesystem(), directory, durable=True, settings=TINY)


def fast_log_store(directory: Path) -> Storage:
    return file_storage(RealFilesystem(), directory, durable=False, settings=TINY)


def acid_store(directory: Path) -> Storage:
    return open_acid(directory, 2, 16 * 1024 * 1024, 256)


@pytest.mark.parametrize("commit", ["inline", "thread"])
@pytest.mark.parametrize("store_of", [log_store, fast_log_store, acid_store])
def test_engine_over_a_real_store_matches_the_model(
    store_of: Callable[[Path], Storage], commit: CommitMode, long: bool
) -> None:
    run_state_machine_as_test(
        machine(lambda: DirectoryBacking(store_of), commit),
        settings=settings(
            max_examples=1000 if long else 10,
            stateful_step_count=50,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
