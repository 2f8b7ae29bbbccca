"""With any content in a data directory, a start succeeds or fails with one sentence that names the problem."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from headwater.config import StorageSettings
from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Append, Create
from headwater.engine.open_storage import open_store
from headwater.storage.interface import Committed, StorageError
from headwater.storage.journaled_store import JournaledStorage
from tests.waiting import wait_until

MODES = ["file-durable", "acid"]
BODY = b"x" * 3000


def start(mode: str, directory: Path) -> Catalog[StreamState]:
    """Open a store, read everything back, and close it."""
    store = open_store(StorageSettings(mode=mode, data_dir=directory, acid_shard_count=1))
    try:
        catalog: Catalog[StreamState] = Catalog(StreamState)
        for record in store.storage.recover():
            catalog.apply(record)
        store.blobs.ids()
        for stream in catalog:
            store.storage.read(stream.id, 0, stream.byte_position)
        return catalog
    finally:
        store.storage.close()


@pytest.fixture(params=MODES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Build a data directory with two streams, in packs or a shard and in the journal."""
    mode = str(request.param)
    directory = tmp_path / "made"
    store = open_store(StorageSettings(mode=mode, data_dir=directory, acid_shard_count=1, segment_bytes=65536))
    storage = store.storage
    list(storage.recover())
    catalog: Catalog[StreamState] = Catalog(StreamState)

    def commit(record: Create | Append) -> None:
        catalog.apply(record)
        storage.write([Committed(record)])
        storage.publish([Committed(record)])
        storage.maintain(lambda stream_id: catalog.by_id[stream_id].image())

    for stream_id in (1, 2):
        commit(Create(stream_id, f"s{stream_id}", 1, "text/plain"))
    for number in range(40):
        commit(Append(1 + number % 2, 1, number // 2, number // 2 * len(BODY), BODY, (len(BODY),)))
    if isinstance(storage, JournaledStorage):
        storage.checkpoint_soon()

        def saved_lsn() -> int:
            assert storage._maintenance is not None
            storage.maintain(lambda stream_id: catalog.by_id[stream_id].image())
            return storage._maintenance._saved_lsn

        wait_until(saved_lsn, every_s=0.001)
        commit(Append(1, 1, 20, 20 * len(BODY), BODY, (len(BODY),)))
    blob = store.blobs.create(7)
    blob.write(b"snapshot")
    blob.finish()
    storage.close()
    return mode, directory


def _swap_directory(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"x")


def _swap_file(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(Random(1).randbytes(5000)),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "missing": Path.unlink,
    "a directory": _swap_file,
}
DIRECTORIES: dict[str, Callable[[Path], object]] = {"missing": shutil.rmtree, "a file": _swap_directory}


def outcome(mode: str, directory: Path) -> tuple[dict[str, int], StorageError | None]:
    try:
        return {stream.name: stream.byte_position for stream in start(mode, directory)}, None
    except StorageError as error:
        return {}, error


def test_start_succeeds_or_fails_with_one_sentence(made: tuple[str, Path], tmp_path: Path) -> None:
    mode, directory = made
    expected = {stream.name: stream.byte_position for stream in start(mode, directory)}
    assert expected["s1"] >= 20 * len(BODY)
    for path in sorted(directory.rglob("*")):
        for kind, spoil in (DIRECTORIES if path.is_dir() else FILES).items():
            if path.name == "data.mdb" and kind == "half":
                # LMDB crashes on a truncated file; see test_damage, which runs it in another process.
                continue
            spoilt = tmp_path / "spoilt"
            shutil.rmtree(spoilt, ignore_errors=True)
            shutil.copytree(directory, spoilt)
            spoil(spoilt / path.relative_to(directory))
            what = f"{path.relative_to(directory)} {kind}"
            found, error = outcome(mode, spoilt)
            if error is not None:
                assert str(spoilt) in str(error), what
            elif found != expected:
                # A tail that looks like a torn, unacknowledged write is removed.
                assert kind in {"half", "zeros"}, f"{what}: the start succeeds"
                assert path.suffix == ".log" or path.name == "MANIFEST", f"{what}: the start succeeds"
