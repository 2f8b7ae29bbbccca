"""Blobs: a finished blob is read back exactly or not at all; an unfinished one leaves no file."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.storage.blobs import PAGE_BYTES, Blob, BlobStore, FileBlobs, MemoryBlobs
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import CorruptError
from tests.storage.faulty_filesystem import Crashed, FaultyFilesystem

SIZES = [0, 1, 1000, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 5]
BLOBS = Path("/blobs")


def write(store: BlobStore, blob_id: int, *pieces: bytes) -> None:
    writer = store.create(blob_id)
    for piece in pieces:
        writer.write(piece)
    writer.finish()


def read(blob: Blob) -> bytes:
    try:
        return blob.read(0, blob.size)
    finally:
        blob.close()


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "memory":
        return MemoryBlobs()
    return FileBlobs(RealFilesystem(), tmp_path / "blobs", durable=True)


@pytest.mark.parametrize("size", SIZES)
def test_blob_reads_back_unchanged(store: BlobStore, size: int) -> None:
    content = Random(size).randbytes(size)
    for blob_id, piece in ((1, 7919), (2, PAGE_BYTES), (2**63 - 1, max(size, 1))):
        write(store, blob_id, *(content[at : at + piece] for at in range(0, size, piece)))
        assert read(store.open(blob_id)) == content
    assert store.ids() == {1, 2, 2**63 - 1}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_range_of_a_blob_can_be_read(data: st.DataObject) -> None:
    content = Random(1).randbytes(2 * PAGE_BYTES + 1000)
    for kind in (MemoryBlobs(), FileBlobs(FaultyFilesystem(Random(1)).mount(), BLOBS, durable=True)):
        write(kind, 5, content)
        blob = kind.open(5)
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, len(content)))
        assert blob.read(start, end) == content[start:end]
        blob.close()


def test_unfinished_blob_is_not_visible(store: BlobStore) -> None:
    writer = store.create(1)
    writer.write(b"x" * 100)
    with pytest.raises(CorruptError):
        store.open(1)
    writer.abort()
    assert store.ids() == set()


def test_an_aborted_blob_leaves_no_file(tmp_path: Path) -> None:
    store = FileBlobs(RealFilesystem(), tmp_path / "blobs", durable=True)
    writer = store.create(1)
    writer.write(b"x" * (2 * PAGE_BYTES))
    writer.abort()
    writer.abort()
    assert list((tmp_path / "blobs").iterdir()) == []


def test_an_open_blob_outlives_its_deletion(store: BlobStore) -> None:
    write(store, 1, b"x" * PAGE_BYTES, b"y")
    blob = store.open(1)
    store.delete(1)
    store.delete(1)
    assert store.ids() == set()
    assert read(blob) == b"x" * PAGE_BYTES + b"y"
    with pytest.raises(CorruptError):
        store.open(1)


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    store = FileBlobs(RealFilesystem(), tmp_path / "blobs", durable=True)
    content = Random(3).randbytes(PAGE_BYTES + 100)
    write(store, 1, content)
    path = tmp_path / "blobs" / f"{1:016x}"
    healthy = path.read_bytes()
    random = Random(4)
    tail = range(len(content) - 5, len(healthy))
    for at in [*(random.randrange(len(healthy)) for _ in range(50)), *tail]:
        damaged = bytearray(healthy)
        damaged[at] ^= 1 << random.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CorruptError):
            read(store.open(1))
    for size in (0, 10, len(healthy) - 1, len(content)):
        path.write_bytes(healthy[:size])
        with pytest.raises(CorruptError):
            read(store.open(1))
    path.write_bytes(healthy + b"x")
    with pytest.raises(CorruptError):
        read(store.open(1))


def test_blob_under_another_name_is_rejected(tmp_path: Path) -> None:
    store = FileBlobs(RealFilesystem(), tmp_path / "blobs", durable=True)
    write(store, 1, b"one")
    (tmp_path / "blobs" / f"{1:016x}").rename(tmp_path / "blobs" / f"{2:016x}")
    with pytest.raises(CorruptError):
        store.open(2)


def test_files_of_other_programs_are_not_deleted(tmp_path: Path) -> None:
    store = FileBlobs(RealFilesystem(), tmp_path / "blobs", durable=True)
    write(store, 1, b"one")
    (tmp_path / "blobs" / "notes.txt").write_text("mine")
    (tmp_path / "blobs" / f"{9:016x}.part").write_bytes(b"half")
    assert store.ids() == {1}
    assert sorted(path.name for path in (tmp_path / "blobs").iterdir()) == [f"{1:016x}", "notes.txt"]


# -- what a crash leaves


def crashed_while_writing(seed: int, crash_at: int, *, power: bool) -> tuple[bool, FaultyFilesystem, bytes]:
    """Write a blob on a disk that crashes at some call; return whether `finish` returned."""
    random = Random(seed)
    disk = FaultyFilesystem(random)
    store = FileBlobs(disk.mount(), BLOBS, durable=True)
    content = random.randbytes(PAGE_BYTES + random.randrange(PAGE_BYTES))
    finished = False
    disk.crash_at = disk.calls + crash_at
    try:
        write(store, 1, content[:1000], content[1000:])
        finished = True
    except Crashed:
        pass
    disk.crash(power=power)
    return finished, disk, content


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("crash_at", range(1, 16))
def test_after_a_crash_a_blob_is_complete_or_absent(crash_at: int, power: bool) -> None:
    outcomes = set()
    for seed in range(30):
        finished, disk, content = crashed_while_writing(seed, crash_at, power=power)
        store = FileBlobs(disk.mount(), BLOBS, durable=True)
        found = store.ids()
        assert found <= {1}
        if finished:
            assert found == {1}
        if 1 in found:
            # A stream may refer to it, so its content must be right.
            try:
                assert read(store.open(1)) == content
            except CorruptError:
                assert not finished
        outcomes.add(finished)
        # The store can be used normally.
        store.delete(1)
        write(store, 1, content)
        assert read(store.open(1)) == content
    assert outcomes


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_disk_failure_is_reported_and_leaves_no_files(code: int) -> None:
    for fails_at in range(1, 12):
        disk = FaultyFilesystem(Random(fails_at))
        store = FileBlobs(disk.mount(), BLOBS, durable=True)
        disk.faults = {disk.calls + fails_at: code}
        writer = None
        try:
            writer = store.create(1)
            writer.write(b"x" * 100_000)
            writer.finish()
        except OSError as error:
            if writer is not None:
                writer.abort()
            assert error.errno == code  # noqa: PT017 - the same for every call that may fail
        disk.faults.clear()
        store.delete(1)
        assert store.ids() == set()
        write(store, 1, b"later")
        assert read(store.open(1)) == b"later"


def test_short_writes_are_continued() -> None:
    disk = FaultyFilesystem(Random(1))
    store = FileBlobs(disk.mount(), BLOBS, durable=True)
    disk.short_writes = set(range(1, 1000, 2))
    content = Random(2).randbytes(PAGE_BYTES * 2 + 77)
    write(store, 1, content)
    assert read(store.open(1)) == content


def test_a_fast_store_does_not_sync(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    synced: list[str] = []
    filesystem = RealFilesystem()
    monkeypatch.setattr(filesystem, "sync_directory", lambda path: synced.append(str(path)))
    store = FileBlobs(filesystem, tmp_path / "blobs", durable=False)
    synced.clear()
    write(store, 1, b"x")
    assert synced == []
    assert read(store.open(1)) == b"x"
