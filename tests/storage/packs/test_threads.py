"""The store as a server runs it: on real files, with writes on one thread, reads on another, and its own worker."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Append, Create, Delete, Image, Record
from headwater.storage.filesystem import Bytes, FileAppender, RealFilesystem
from headwater.storage.interface import Committed, ImageOf, StorageError
from headwater.storage.journaled_store import JournaledStorage, StoreSettings
from headwater.storage.packs.offline import find_damage
from headwater.storage.packs.pack_store import file_storage
from headwater.storage.worker import Job, Outcome, ThreadWorker
from tests.waiting import LIMIT_S, wait_until

SMALL = StoreSettings(
    segment_bytes=256 * 1024,
    hot_tail_bytes=512 * 1024,
    busy_floor_bytes=0,
    reserve_bytes=0,
    big_bytes=64 * 1024,
    fanout=3,
)


class HeldAppender:
    """A file whose syncs wait until the test allows them."""

    def __init__(self, real: FileAppender, allowed: threading.Event) -> None:
        self._real = real
        self._allowed = allowed

    def write(self, data: Bytes) -> int:
        return self._real.write(data)

    def write_parts(self, parts: Sequence[Bytes]) -> int:
        return self._real.write_parts(parts)

    def allocate(self, offset: int, length: int) -> None:
        self._real.allocate(offset, length)

    def sync(self) -> None:
        assert self._allowed.wait(LIMIT_S), "the test never allowed this sync"
        self._real.sync()

    def close(self) -> None:
        self._real.close()


class HeldPacks(RealFilesystem):
    """A disk on which checkpoints cannot keep up with the journal: their syncs wait until the test allows them."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Event()
        self.allowed.set()

    def create(self, path: Path) -> FileAppender:
        real = super().create(path)
        return HeldAppender(real, self.allowed) if path.suffix in {".pack", ".new"} else real

    def extend(self, path: Path) -> FileAppender:
        return HeldAppender(super().extend(path), self.allowed)


def opened(storage: JournaledStorage) -> Catalog[StreamState]:
    catalog: Catalog[StreamState] = Catalog(StreamState)
    for record in storage.recover():
        catalog.apply(record)
    return catalog


def image_of(*records: Record) -> ImageOf:
    catalog: Catalog[StreamState] = Catalog(StreamState)
    for record in records:
        catalog.apply(record)

    def image(stream_id: int) -> Image | None:
        return catalog.by_id[stream_id].image()

    return image


def wait_for(outcome: Outcome) -> None:
    wait_until(lambda: outcome.done, what="the job ends", every_s=0.001)


def maintain_until(storage: JournaledStorage, image: ImageOf, done: Callable[[], bool]) -> None:
    def look() -> bool:
        storage.maintain(image)
        return done()

    wait_until(look, every_s=0.001)


class Server:
    """A stand-in for the engine: batches are written on a thread, and published and maintained here."""

    def __init__(self, storage: JournaledStorage) -> None:
        self.storage = storage
        self.catalog = opened(storage)
        self.pending: set[int] = set()
        self.peak_bytes = 0

    def image(self, stream_id: int) -> Image | None:
        stream = self.catalog.by_id.get(stream_id)
        return stream.image() if stream is not None and stream_id not in self.pending else None

    def commit(self, records: list[Create | Append], ahead: set[int]) -> None:
        batch = [Committed(record) for record in records]
        self.pending = {record.id for record in records}
        failures: list[BaseException] = []

        def write() -> None:
            try:
                self.storage.write(batch)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        while thread.is_alive():
            # The loop continues to run.
            self.storage.maintain(self.image)
            thread.join(0.0005)
        if failures:
            raise failures[0]
        self.storage.publish(batch)
        self.pending = ahead
        self.storage.maintain(self.image)
        self.peak_bytes = max(self.peak_bytes, self.storage.usage().memory_bytes)

    def append(self, stream_id: int, payload: bytes) -> Append:
        stream = self.catalog.by_id[stream_id]
        record = Append(stream_id, 1, stream.message_index, stream.byte_position, payload, (len(payload),))
        self.catalog.apply(record)
        return record


@pytest.mark.parametrize("durable", [True, False], ids=["file-durable", "file-fast"])
def test_concurrent_writes_reads_checkpoints_and_merges_are_consistent(tmp_path: Path, durable: bool) -> None:
    random = Random(7)
    server = Server(file_storage(RealFilesystem(), tmp_path, durable=durable, settings=SMALL))
    storage = server.storage
    contents: dict[int, bytearray] = {}
    for stream_id in range(1, 25):
        create = Create(stream_id, f"s{stream_id}", 1, "text/plain")
        server.catalog.apply(create)
        server.commit([create], set())
        contents[stream_id] = bytearray()
    for _ in range(250):
        records: list[Create | Append] = []
        for stream_id in random.sample(sorted(contents), 6):
            payload = random.randbytes(random.choice((10, 500, 5000)))
            records.append(server.append(stream_id, payload))
            contents[stream_id] += payload
        server.commit(records, set(random.sample(sorted(contents), 3)))
        stream_id = random.choice(sorted(contents))
        end = len(contents[stream_id])
        start = random.randint(0, end)
        assert b"".join(storage.read(stream_id, start, end)) == contents[stream_id][start:end]
    server.pending = set()
    maintain_until(
        storage, server.image, lambda: storage._maintenance is not None and storage._maintenance._steps is None
    )
    assert storage.parts()["packs"] > 0
    storage.close()
    assert list(find_damage(RealFilesystem(), tmp_path)) == []
    again = file_storage(RealFilesystem(), tmp_path, durable=durable, settings=SMALL)
    catalog = opened(again)
    for stream_id, content in contents.items():
        assert catalog.by_id[stream_id].byte_position == len(content)
        assert b"".join(again.read(stream_id, 0, len(content))) == content
    again.close()


def test_memory_stays_bounded_when_checkpoints_cannot_keep_up(tmp_path: Path) -> None:
    """The store reports busy. No write waits for a checkpoint: each one completes while the syncs of packs are held."""
    disk = HeldPacks()
    server = Server(file_storage(disk, tmp_path, durable=False, settings=SMALL))
    busy_times = 0
    creates: list[Create | Append] = [Create(number, f"s{number}", 1, "text/plain") for number in range(1, 6)]
    for create in creates:
        server.catalog.apply(create)
    server.commit(creates, set())
    payload = Random(1).randbytes(8000)
    disk.allowed.clear()
    for number in range(400):
        if server.storage.busy():
            busy_times += 1
            disk.allowed.set()
            maintain_until(server.storage, server.image, lambda: not server.storage.busy())
            disk.allowed.clear()
        server.commit([server.append(1 + number % 5, payload)], set())
    disk.allowed.set()
    assert busy_times > 2
    assert server.storage.usage().payload_bytes == 400 * 8000
    assert server.peak_bytes <= 2 * SMALL.hot_tail_bytes + 2 * 8400
    server.storage.close()


def test_full_store_refuses_writes_and_recovers_automatically(tmp_path: Path) -> None:
    class Filling(RealFilesystem):
        free = 10**12

        def free_bytes(self, path: Path) -> int:
            return self.free

    now = [0.0]
    disk = Filling()
    storage = file_storage(disk, tmp_path, durable=False, clock=lambda: now[0])
    opened(storage)
    assert storage.refusal() is None
    disk.free = 1000
    assert storage.refusal() is None, "checked once a second at most"
    now[0] += 1.5
    refusal = storage.refusal()
    assert refusal is not None
    assert "nearly full" in refusal
    assert str(tmp_path) in refusal
    disk.free = 10**12
    now[0] += 1.5
    assert storage.refusal() is None
    storage.close()


def test_two_processes_cannot_have_the_same_store(tmp_path: Path) -> None:
    first = file_storage(RealFilesystem(), tmp_path, durable=True)
    with pytest.raises(StorageError, match="in use by process"):
        file_storage(RealFilesystem(), tmp_path, durable=True)
    first.close()
    file_storage(RealFilesystem(), tmp_path, durable=True).close()


def test_urgent_jobs_run_between_the_steps_of_others() -> None:
    order: list[str] = []
    gate = threading.Event()

    def slow() -> Job:
        for number in range(5):
            order.append(f"slow {number}")
            if number == 1:
                gate.wait(LIMIT_S)
            yield

    def quick() -> Job:
        order.append("quick")
        yield
        return "done"

    worker = ThreadWorker()
    worker.submit(slow(), urgent=False)
    wait_until(lambda: len(order) >= 2, every_s=0.001)
    urgent = worker.submit(quick(), urgent=True)
    gate.set()
    wait_for(urgent)
    assert urgent.result == "done"
    assert order[:3] == ["slow 0", "slow 1", "quick"]
    worker.close()


def test_closing_a_worker_cancels_jobs_that_are_not_urgent() -> None:
    tidied = []

    def endless() -> Job:
        try:
            while True:
                yield
        finally:
            tidied.append(True)

    worker = ThreadWorker()
    worker.submit(endless(), urgent=False)
    worker.close()
    assert tidied == [True]


def test_error_of_a_job_is_kept_for_its_caller() -> None:
    def failing() -> Job:
        yield
        raise OSError(5, "broken")

    worker = ThreadWorker()
    outcome = worker.submit(failing(), urgent=True)
    wait_for(outcome)
    assert isinstance(outcome.error, OSError)
    worker.close()


def test_many_dead_packs_are_removed_with_few_descriptors(tmp_path: Path) -> None:
    """Two descriptors for each of them would exceed the limit."""
    settings = StoreSettings(segment_bytes=256 * 1024, reserve_bytes=0, fanout=10**6, open_packs_max=4)
    storage = file_storage(RealFilesystem(), tmp_path, durable=False, settings=settings)
    server = Server(storage)
    count = 80
    for stream_id in range(1, count + 1):
        create = Create(stream_id, f"s{stream_id}", 1, "text/plain", payload=b"x" * 100, lengths=(100,))
        server.catalog.apply(create)
        server.commit([create], set())
        storage.checkpoint_soon()
        maintain_until(storage, server.image, lambda packs=stream_id: storage.parts()["packs"] == packs)  # type: ignore[misc]
    deletions = [Delete(stream_id, 2) for stream_id in range(1, count + 1)]
    batch = [Committed(deletion, server.catalog.apply(deletion)) for deletion in deletions]
    storage.write(batch)
    storage.publish(batch)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
    try:
        storage.checkpoint_soon()
        maintain_until(storage, server.image, lambda: not list((tmp_path / "packs").iterdir()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    storage.close()
