"""A deterministic simulation of a store in one thread, on a disk that crashes; everything follows from one seed.

`SimulatedProcess` decides operations by the real rules, writes them in batches, lets the worker do a few steps and
checks what it reads. `Simulation` runs processes one after another with crashes in between, also during recovery, and
checks every recovery against three outcomes: acknowledged records are present, complete, in order and once; a batch
that was being written is present completely or not at all; refused records are absent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from headwater.core.catalog import Catalog, StreamState
from headwater.core.errors import Refusal
from headwater.core.producers import ProducerHeaders
from headwater.core.records import Append, Create, Delete, Document, ForkPoint, Image, Retain, Touch
from headwater.core.rules import CreateRequest, decide_append, decide_create
from headwater.storage.interface import Committed, StorageError
from headwater.storage.journaled_store import JournaledStorage, StoreSettings
from headwater.storage.packs.pack_store import PackStore, file_storage
from headwater.storage.worker import Job, Outcome
from tests.storage.faulty_filesystem import Crashed, FaultyFilesystem
from tests.storage.model import Model, difference, model_of, split

DATA = Path("/data")

TINY = StoreSettings(
    segment_bytes=4096,
    hot_tail_bytes=4000,
    reserve_bytes=0,
    big_bytes=2048,
    fanout=3,
    open_packs_max=3,
    manifest_floor_bytes=2048,
    clock_check_every=1,
)
"""So small that a few dozen appends start segments, make checkpoints, merge packs and rewrite the manifest."""


def packs_of(storage: JournaledStorage) -> PackStore:
    """Return the cold store of a store in one of the file modes."""
    assert isinstance(storage._cold, PackStore)
    return storage._cold


class SteppedWorker:
    """A worker that the test runs one step of one job at a time."""

    def __init__(self) -> None:
        self.hurry = False
        self.first: deque[Outcome] = deque()
        self.urgent: deque[Outcome] = deque()
        self.background: deque[Outcome] = deque()

    def submit(self, job: Job, *, urgent: bool, first: bool = False) -> Outcome:
        outcome = Outcome(job)
        (self.first if first else self.urgent if urgent else self.background).append(outcome)
        return outcome

    def step(self) -> bool:
        queue = self.first or self.urgent or self.background
        if not queue:
            return False
        queue[0].step()
        error = queue[0].error
        if error is not None and not isinstance(error, OSError | StorageError):
            # A bug or the crash: the store would only log it.
            raise error
        if queue[0].done:
            queue.popleft()
        return True

    def close(self) -> None:
        while self.first or self.urgent:
            self.step()
        for outcome in self.background:
            outcome.job.close()


class Ticks:
    """A clock that advances a little at every reading."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self._step_s = step_s

    def __call__(self) -> float:
        self.now_s += self._step_s
        return self.now_s


class SimulatedProcess:
    """One process on the disk, from startup to its end."""

    def __init__(
        self,
        filesystem: FaultyFilesystem,
        random: Random,
        *,
        durable: bool = True,
        settings: StoreSettings = TINY,
        make: Callable[..., JournaledStorage] = file_storage,
        tick_s: float = 0.0005,
    ) -> None:
        self.filesystem = filesystem
        self.random = random
        self.worker = SteppedWorker()
        self.clock = Ticks(tick_s)
        self.now_ms = 1_700_000_000_000
        self.catalog: Catalog[StreamState] = Catalog(StreamState)
        self.queue: list[Committed] = []
        self.unknown: list[Committed] = []
        """The batch whose write failed: it may be stored or not. Everything after it was refused."""
        self.failed = False
        self.is_worker_slow = False
        """Whether even urgent jobs wait until the worker is allowed to run."""
        self.history: list[Committed] = []
        """Every record that was written, with any outcome."""
        self.model = Model()
        self.storage = make(
            filesystem.mount(), DATA, durable=durable, settings=settings, worker=self.worker, clock=self.clock
        )
        for record in self.storage.recover():
            self.catalog.apply(record)

    def begin_from(self, model: Model) -> None:
        """Continue from the recovered state, as a server does."""
        self.model = model
        for stream_id in model.streams:
            self._trim(stream_id)

    # -- operations ------------------------------------------------------------------------------------------------

    def create(self, name: str, body: bytes = b"", *, content_type: str = "text/plain", ttl: int | None = None) -> int:
        assert name not in self.catalog.by_name
        request = CreateRequest(name, content_type, ttl, None, False, body)
        return self._decide(decide_create(request, self.random.getrandbits(63) | 1, self._now()))

    def fork(self, name: str, source_name: str, message_index: int, byte_position: int) -> int:
        source = self.catalog.by_name[source_name]
        point = ForkPoint(source.id, source.name, message_index, byte_position)
        return self._decide(Create(self.random.getrandbits(63) | 1, name, self._now(), source.type.header, fork=point))

    def append(
        self,
        name: str,
        body: bytes,
        *,
        producer: ProducerHeaders | None = None,
        stream_seq: str | None = None,
        close: bool = False,
    ) -> None:
        stream = self.catalog.by_name[name]
        decision = decide_append(stream, stream.type.header, body, producer, stream_seq, close, self._now())
        if isinstance(decision, Append):
            self._decide(decision)

    def delete(self, name: str) -> None:
        record = Delete(self.catalog.by_name[name].id, self._now())
        self.queue.append(Committed(record, self.catalog.apply(record)))

    def touch(self, name: str) -> None:
        self._decide(Touch(self.catalog.by_name[name].id, self._now()))

    def retain(self, name: str, message_index: int, byte_position: int) -> None:
        self._decide(Retain(self.catalog.by_name[name].id, self._now(), message_index, byte_position))

    def document(self, key: str, value: bytes | None) -> None:
        record = Document(key, value)
        self.catalog.apply(record)
        self.queue.append(Committed(record))

    def _decide(self, record: Create | Append | Touch | Retain) -> int:
        self.catalog.apply(record)
        self.queue.append(Committed(record))
        return record.id

    def _now(self) -> int:
        self.now_ms += 1
        return self.now_ms

    # -- committing ------------------------------------------------------------------------------------------------

    def commit(self, size: int | None = None) -> None:
        """Write the queue, or only its first records; the rest stays pending, as while a thread writes."""
        for _ in range(200):
            if not self.storage.busy() or self.storage.refusal():
                break
            # The engine accepts nothing new until some of it is saved.
            self.maintain()
            self.worker.step()
        batch = self.queue[:size]
        del self.queue[:size]
        if not batch:
            return
        self.history += batch
        try:
            self.storage.write(batch)
        except BaseException:
            if not self.failed:
                self.unknown = batch
                self.failed = True
            raise
        assert not self.failed, "a batch was acknowledged after a failed write"
        self.model.apply_all(batch)
        self.storage.publish(batch)
        for record, _ in batch:
            if isinstance(record, Retain):
                self._trim(record.id)
        self.maintain()

    def _trim(self, stream_id: int) -> None:
        """Free data that can no longer be read; data that forks share stays."""
        stream = self.model.streams.get(stream_id)
        if stream is not None and not any(other.fork_of == stream_id for other in self.model.streams.values()):
            self.storage.trim(stream_id, *stream.start)

    def maintain(self) -> None:
        self.storage.maintain(self.image_of)
        while self.worker.first and not self.is_worker_slow:
            self.worker.step()

    def image_of(self, stream_id: int) -> Image | None:
        stream = self.catalog.by_id.get(stream_id)
        if stream is None or any(not isinstance(r, Document) and r.id == stream_id for r, _ in self.queue):
            return None
        return stream.image()

    def rest(self, seconds: float = 2.0) -> None:
        """Advance the time and let the worker finish its jobs."""
        for _ in range(8):
            self.clock.now_s += seconds
            self.maintain()
            while self.worker.step():
                pass

    def abandon(self) -> None:
        """Drop all jobs, because the process has ended."""
        for outcome in (*self.worker.first, *self.worker.urgent, *self.worker.background):
            with suppress(Crashed):
                outcome.job.close()

    def outcomes(self) -> list[Model]:
        """The states that are possible after a crash now."""
        return [self.model, self.model.after(self.unknown)] if self.unknown else [self.model]

    # -- checking --------------------------------------------------------------------------------------------------

    def check_state(self) -> None:
        """Compare the whole store with the whole model; nothing may be pending."""
        assert not self.queue
        expected, found = self.model.dump(), model_of(self.catalog, self.storage).dump()
        assert expected == found, difference(expected, found)

    def check_reads(self) -> None:
        """Check a reader's calls on one stream, if its published state equals the model's."""
        if not self.model.streams:
            return
        stream_id = self.random.choice(list(self.model.streams))
        stream = self.model.streams[stream_id]
        ends = [stream.start[1]]
        for message in stream.messages:
            ends.append(ends[-1] + len(message))
        data = b"".join(stream.messages)
        low = self.random.randrange(len(ends))
        high = self.random.randrange(low, len(ends))
        base_index, base = stream.start
        storage = self.storage
        assert storage.boundary(stream_id, base_index + low) == ends[low]
        read = b"".join(storage.read(stream_id, ends[low], ends[high]))
        assert read == data[ends[low] - base : ends[high] - base], f"wrong bytes of {stream.name}"
        if high == low:
            return
        lengths = [len(message) for message in stream.messages[low:high]]
        assert list(storage.lengths(stream_id, base_index + low, base_index + high)) == lengths
        max_bytes = self.random.choice((0, 1, 100, 1000, 5000, 10**6))
        fitting = [at for at in range(low + 1, high + 1) if ends[at] - ends[low] <= max_bytes]
        at = fitting[-1] if fitting else low + 1
        found = storage.cut(stream_id, base_index + low, ends[low], base_index + high, max_bytes)
        assert found == (base_index + at, ends[at]), f"cut {found}, expected {(base_index + at, ends[at])}"


class Simulation:
    """Processes and crashes on one disk."""

    def __init__(
        self,
        seed: int,
        *,
        durable: bool = True,
        settings: StoreSettings = TINY,
        power: bool = True,
        make: Callable[..., JournaledStorage] = file_storage,
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.filesystem = FaultyFilesystem(Random(seed + 1))
        self.model = Model()
        self._durable = durable
        self._settings = settings
        self._power = power
        self._make = make
        self._names = 0
        self.recoveries = 0

    def become(self, *, durable: bool, power: bool) -> None:
        """Switch to the other mode on the same disk."""
        self._durable = durable
        self._power = power

    def run(self, generations: int = 5, steps: int = 60) -> None:
        with self._telling_the_seed():
            candidates = [self.model]
            for _ in range(generations):
                process = self.boot(candidates)
                candidates = self._live(process, steps)
            process = self.boot(candidates)
            process.rest()
            process.check_state()
            process.storage.close()
            self.filesystem.crash(power=False)
            process = self.boot([process.model])
            process.storage.close()
            self.filesystem.crash(power=self._power)
            self.model = process.model

    def run_without_durability(self, generations: int) -> None:
        """Lose power in a mode that does not sync: every stream must be recovered in some earlier state."""
        with self._telling_the_seed():
            pasts: dict[int, list[bytes]] = {}
            for _ in range(generations):
                process = self._recovered()
                found = model_of(process.catalog, process.storage)
                for stream_id, stream in found.streams.items():
                    first = stream.start[0] - stream.base[0]
                    past = pasts[stream_id][first : first + len(stream.messages)]
                    assert stream.messages == past, f"{stream.name} has invented data"
                    del pasts[stream_id][first + len(stream.messages) :]
                process.begin_from(found)
                self._live(process, 60)
                for record, _ in process.history:
                    if isinstance(record, Create):
                        pasts[record.id] = split(record.payload, record.lengths)
                    elif isinstance(record, Append):
                        pasts[record.id] += split(record.payload, record.lengths)

    @contextmanager
    def _telling_the_seed(self) -> Iterator[None]:
        try:
            yield
        except (AssertionError, StorageError, OSError, LookupError) as error:
            raise AssertionError(f"seed {self.seed}: {type(error).__name__}: {error}") from error

    def boot(self, candidates: list[Model]) -> SimulatedProcess:
        """Recover, and find which of the possible states was recovered."""
        process = self._recovered()
        found = model_of(process.catalog, process.storage).dump()
        for model in candidates:
            if model.dump() == found:
                process.begin_from(model.copy())
                return process
        raise AssertionError(f"after recovery {self.recoveries}: {difference(candidates[0].dump(), found)}")

    def _recovered(self) -> SimulatedProcess:
        """Return a process that has recovered, after some that crashed during recovery."""
        process = None
        while process is None:
            if self.random.random() < 0.4:
                self.filesystem.crash_at = self.filesystem.calls + self.random.randint(1, 60)
            try:
                process = SimulatedProcess(
                    self.filesystem,
                    self.random,
                    durable=self._durable,
                    settings=self._settings,
                    make=self._make,
                )
            except (Crashed, StorageError):
                if not self.filesystem.dead:
                    raise
                self._crash()
        self.filesystem.crash_at = None
        self.recoveries += 1
        process.now_ms += self.recoveries * 1_000_000
        return process

    def _crash(self) -> None:
        self.filesystem.crash(power=self._power and self.random.random() < 0.6)

    def _live(self, process: SimulatedProcess, steps: int) -> list[Model]:
        """Run until the process dies; return the states that are possible afterwards."""
        fate = self.random.random()
        if fate < 0.5:
            self.filesystem.crash_at = self.filesystem.calls + self.random.randint(1, 300)
        elif fate < 0.75:
            # The most critical moment: written, but not yet synced.
            name, most = self.random.choice(((".log", 20), ("MANIFEST", 6), (".pack", 6)))
            self.filesystem.crash_in_sync = (name, self.random.randint(0, most))
        try:
            for _ in range(self.random.choice((1, steps // 2, steps))):
                self.step(process)
            if self.random.random() < 0.2:
                process.commit()
                process.storage.close()
        except (Crashed, StorageError):
            if not self.filesystem.dead:
                raise
        self._crash()
        process.abandon()
        return process.outcomes()

    def step(self, process: SimulatedProcess) -> None:
        random = self.random
        process.is_worker_slow = random.random() < 0.2
        for _ in range(random.choice((1, 1, 2, 5))):
            self._operation(process)
        if random.random() < 0.8:
            process.commit(random.choice((None, None, 1, 2)))
        for _ in range(random.choice((0, 0, 1, 3, 20))):
            process.worker.step()
        if random.random() < 0.3:
            process.check_reads()
        if random.random() < 0.1:
            process.clock.now_s += 1.0
            process.maintain()

    def _operation(self, process: SimulatedProcess) -> None:
        random = self.random
        living = [name for name, stream in process.catalog.by_name.items() if not stream.deleted]
        if not living or (len(living) < 6 and random.random() < 0.15):
            self._names += 1
            reuse = f"s{random.randint(0, 5)}"
            name = reuse if reuse not in process.catalog.by_name else f"n{self._names}"
            process.create(name, self._body() if random.random() < 0.3 else b"", ttl=random.choice((None, 60)))
            return
        name = random.choice(living)
        stream = process.catalog.by_name[name]
        fate = random.random()
        try:
            if fate < 0.06:
                process.delete(name)
            elif fate < 0.10:
                process.touch(name)
            elif fate < 0.14:
                process.document(f"k{random.randint(0, 3)}", random.choice((None, random.randbytes(20))))
            elif fate < 0.18:
                self._fork(process, stream)
            elif fate < 0.21:
                self._retain(process, stream)
            else:
                self._append(process, name, stream)
        except Refusal:
            pass

    def _append(self, process: SimulatedProcess, name: str, stream: StreamState) -> None:
        random = self.random
        producer = None
        if random.random() < 0.4:
            producer_id = f"p{random.randint(0, 2)}"
            state = (stream.producers or {}).get(producer_id)
            if state is None:
                producer = ProducerHeaders(producer_id, 0, 0)
            else:
                producer = random.choice(
                    (
                        ProducerHeaders(producer_id, state.epoch, state.seq + 1),
                        ProducerHeaders(producer_id, state.epoch, state.seq),
                        ProducerHeaders(producer_id, state.epoch + 1, 0),
                    )
                )
        seq = f"{process.now_ms:020d}" if random.random() < 0.2 else None
        process.append(name, self._body(), producer=producer, stream_seq=seq, close=random.random() < 0.04)

    def _fork(self, process: SimulatedProcess, stream: StreamState) -> None:
        self._names += 1
        if stream.closed:
            process.append(stream.name, b"")
        process.fork(f"f{self._names}", stream.name, stream.message_index, stream.byte_position)

    def _retain(self, process: SimulatedProcess, stream: StreamState) -> None:
        known = process.model.streams.get(stream.id)
        if known is None or stream.deleted or stream.retained_index > known.start[0]:
            return
        drop = self.random.randint(0, len(known.messages))
        message_index, byte_position = known.start
        if drop:
            process.retain(stream.name, message_index + drop, byte_position + sum(map(len, known.messages[:drop])))

    def _body(self) -> bytes:
        size = self.random.choice((1, 20, 100, 100, 300, 700, 2500))
        return self.random.randbytes(size)


def run_seeds(seeds: range, **options: Any) -> int:
    """Run a simulation for each seed; return the number of recoveries checked."""
    generations, steps = options.pop("generations", 5), options.pop("steps", 60)
    checked = 0
    for seed in seeds:
        simulation = Simulation(seed, **options)
        simulation.run(generations, steps)
        checked += simulation.recoveries
    return checked
