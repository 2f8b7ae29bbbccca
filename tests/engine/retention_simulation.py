"""A simulation of forks, snapshots and retention, compared with a model that keeps all messages forever.

After every step each stream is read completely and compared with the model, and the number of stored bytes is compared
with the number that is needed according to an independent implementation of the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.records import RetentionPolicy
from headwater.core.retention import SLACK_SHARE
from headwater.core.rules import CreateRequest, ForkRequest
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.reading import earliest
from headwater.engine.retention import Pin
from headwater.engine.stream import LiveStream
from headwater.storage.blobs import BlobStore, MemoryBlobs
from headwater.storage.interface import Storage
from tests.engine.seams import JournalStorage, ManualClock, ManualScheduler

BUCKET = "bucket"


@dataclass
class Expected:
    """The expected state of a stream: all of its messages, inherited ones first."""

    name: str
    messages: list[bytes]
    base: int = 0
    partial: int = 0
    """Length of its last inherited message if that is only a part of the source's message."""
    source: Expected | None = None
    retained: int = 0
    snapshot: bytes | None = None
    keeps: int | None = None
    """The retention limit in bytes: data is dropped when the stream exceeds it by a share; None keeps all."""
    deleted: bool = False
    pins: list[tuple[int, Pin]] = field(default_factory=list)

    def offset(self, index: int) -> Offset:
        return Offset(index, sum(map(len, self.messages[:index])))


class RetentionSimulation:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.journal: list[tuple[bytes, tuple[int, ...]]] = []
        self.kept_blobs = MemoryBlobs()
        self.clock = ManualClock()
        self.streams: list[Expected] = []
        self.names = 0
        self.start()
        self.engine.buckets.create(BUCKET, self.must_work)
        self.run_until_idle()

    def start(self) -> None:
        self.scheduler = ManualScheduler(self.clock)
        self.storage, self.blobs = self.open()
        self.engine = Engine(
            self.storage, self.clock, self.scheduler, EngineLimits(), blobs=self.blobs, commit="inline"
        )
        self.engine.start()

    def open(self) -> tuple[Storage, BlobStore]:
        """Open the store as after a restart: here a journal in a list, and blobs in memory."""
        return JournalStorage(self.journal), self.kept_blobs

    def run_until_idle(self) -> None:
        self.scheduler.run_until_idle()

    # -- steps

    def step(self) -> None:
        kinds = (
            ["append"] * 5
            + ["fork"] * 3
            + ["publish"] * 3
            + ["delete", "create", "create", "create_bounded", "drop", "drop", "pin", "unpin", "crash"]
        )
        getattr(self, self.random.choice(kinds))()
        # Sometimes several steps make one batch.
        if self.random.random() < 0.7:
            self.run_until_idle()
            self.check()

    def live(self) -> Expected | None:
        found = [stream for stream in self.streams if not stream.deleted]
        return self.random.choice(found) if found else None

    def fresh_name(self) -> str:
        self.names += 1
        return f"/ds/{BUCKET}/s{self.names}"

    def create(self) -> None:
        stream = Expected(self.fresh_name(), [])
        request = CreateRequest(stream.name, "text/plain", None, None, False, b"")
        self.engine.buckets.create_stream(BUCKET, request, self.must_work)
        self.streams.append(stream)

    def create_bounded(self) -> None:
        """Create a stream with a retention limit."""
        stream = Expected(self.fresh_name(), [], keeps=self.random.randint(1, 60))
        policy = RetentionPolicy(None, stream.keeps, True)
        request = CreateRequest(stream.name, "text/plain", None, None, False, b"", None, policy)
        self.engine.buckets.create_stream(BUCKET, request, self.must_work)
        self.streams.append(stream)

    def drop(self) -> None:
        """Apply retention: a bounded stream drops as many whole messages as its limit allows."""
        self.run_until_idle()
        for _ in self.engine.retention.check_next():
            pass
        for stream in self.streams:
            if stream.deleted or stream.keeps is None or stream.snapshot is not None:
                continue
            sizes = [len(message) for message in stream.messages[stream.retained :]]
            excess, spared = sum(sizes) - stream.keeps, 0
            if excess <= stream.keeps // SLACK_SHARE:
                continue
            for size in sizes:
                if spared + size > excess:
                    break
                spared += size
                stream.retained += 1

    def append(self) -> None:
        stream = self.live()
        if stream is not None:
            message = self.random.randbytes(self.random.randint(1, 30))
            stream.messages.append(message)
            self.engine.append(stream.name, "text/plain", message, None, None, False, self.must_work)

    def fork(self) -> None:
        self.run_until_idle()
        source = self.live()
        if source is None:
            return
        at = self.random.randint(source.retained, len(source.messages))
        sub = 0
        messages = source.messages[:at]
        if at < len(source.messages) and self.random.random() < 0.4:
            sub = self.random.randint(1, len(source.messages[at]))
            messages = [*messages, source.messages[at][:sub]]
        fork = Expected(
            self.fresh_name(), messages, len(messages), sub, source, source.retained, source.snapshot, source.keeps
        )
        request = ForkRequest(source.name, str(source.offset(at)), sub)
        self.engine.buckets.create_stream(
            BUCKET, CreateRequest(fork.name, None, None, None, False, b"", request), self.must_work
        )
        self.streams.append(fork)

    def publish(self) -> None:
        self.run_until_idle()
        stream = self.live()
        if stream is None:
            return
        index = self.random.randint(stream.retained, len(stream.messages))
        content = self.random.randbytes(5)
        upload = self.engine.snapshots.upload()
        upload.write(content)
        self.engine.snapshots.publish(stream.name, str(stream.offset(index)), "a/b", upload, self.must_work)
        stream.retained, stream.snapshot = index, content

    def delete(self) -> None:
        stream = self.live()
        if stream is not None:
            stream.deleted = True
            self.engine.delete(stream.name, self.must_work)

    def pin(self) -> None:
        self.run_until_idle()
        stream = self.live()
        if stream is not None:
            found = self.engine.look_up(stream.name)
            stream.pins.append((stream.retained, self.engine.retention.pin(found, earliest(found))))

    def unpin(self) -> None:
        self.run_until_idle()
        pinned = [stream for stream in self.streams if stream.pins]
        if pinned:
            stream = self.random.choice(pinned)
            stream.pins.pop(self.random.randrange(len(stream.pins)))[1].release()

    def crash(self) -> None:
        """Restart the engine after all queued work is done, so that only the pins are lost."""
        self.run_until_idle()
        for stream in self.streams:
            stream.pins.clear()
        self.start()
        self.check()

    # -- checks

    def must_work(self, result: object) -> None:
        assert not isinstance(result, Refusal), result

    def check(self) -> None:
        for stream in self.streams:
            if not stream.deleted:
                self.check_readable(stream, self.engine.look_up(stream.name))
        needed = 0
        for stream in self.streams:
            found = self.engine.catalog.by_name.get(stream.name)
            assert (found is not None) == self.still_exists(stream), stream.name
            if found is not None:
                assert found.deleted == stream.deleted, stream.name
                needed += sum(map(len, stream.messages[max(stream.base, self.floor(stream)) :]))
                floor = max(stream.base, self.floor(stream))
                assert found.floor_index == floor, f"{stream.name} begins at {found.floor_index}, expected {floor}"
        assert len(self.engine.catalog.by_id) == sum(map(self.still_exists, self.streams))
        snapshots = {id(stream.snapshot): stream.snapshot for stream in self.streams if not stream.deleted}
        kept = sum(len(content) for content in snapshots.values() if content is not None)
        assert self.storage.usage().payload_bytes == needed
        assert self.engine.total_bytes == needed + kept
        assert len(self.blobs.ids()) == sum(content is not None for content in snapshots.values())

    def check_readable(self, stream: Expected, found: LiveStream) -> None:
        start = min([stream.retained, *(index for index, _ in stream.pins)])
        reader = self.engine.reader
        chunk = reader.chunk(found, stream.offset(start), 2**40)
        assert b"".join(reader.buffers(chunk)) == b"".join(stream.messages[start:])
        assert reader.lengths(chunk) == [len(message) for message in stream.messages[start:]]
        assert str(earliest(found)) == str(stream.offset(stream.retained))
        for index in range(stream.retained, len(stream.messages) + 1):
            assert reader.resolve(found, str(stream.offset(index))) == stream.offset(index)
        assert self.snapshot_of(found) == stream.snapshot

    def snapshot_of(self, found: LiveStream) -> bytes | None:
        snapshot = self.engine.snapshots.open(found)
        if snapshot is None:
            return None
        try:
            return b"".join(snapshot.pages())
        finally:
            snapshot.close()

    def still_exists(self, stream: Expected) -> bool:
        return not stream.deleted or any(fork.source is stream and self.still_exists(fork) for fork in self.streams)

    def floor(self, stream: Expected) -> int:
        """The first message that the stream or any fork of it still needs."""
        needs = [len(stream.messages)]
        if not stream.deleted:
            needs += [stream.retained, *(index for index, _ in stream.pins)]
        for fork in self.streams:
            if fork.source is stream and self.still_exists(fork):
                need = self.floor(fork)
                if need < fork.base:
                    needs.append(need)
        return min(needs)
