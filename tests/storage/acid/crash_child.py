"""A process for crash tests: it appends to an `acid` store and prints what it is about to do and has done.

    python -m tests.storage.acid.crash_child DIRECTORY SEED RESUME BATCHES [FAULT]

It ends after BATCHES batches without closing the store, or never if that is 0. RESUME is a JSON object with the last
acknowledged sequence number of every producer. The process continues from there like a retrying client, so an append
that was stored but not answered must be found as a duplicate. Lines:

- `ready`: the store is open and recovered.
- `try RECORDS`: the batch that is written next, as base64 of its encoded records.
- `ack SEQS`: that batch is durable; a JSON object with the producers' sequence numbers that are now acknowledged.
- `reject MARK`: an append with this payload was refused; it must never be readable.

FAULT selects a deliberate fault, which the checker must detect.
"""

from __future__ import annotations

import base64
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import msgspec

from headwater.core.catalog import StreamState
from headwater.core.errors import Refusal
from headwater.core.producers import ProducerHeaders, remember
from headwater.core.records import Append, ForkPoint, Record
from headwater.core.rules import AppendOutcome, decide_append
from headwater.storage.acid import pieces, shard, shard_store
from headwater.storage.acid.applier import Applier
from headwater.storage.acid.layout import write_mark
from headwater.storage.acid.rows import ID
from headwater.storage.acid.shard_store import ShardStore
from headwater.storage.filesystem import FileAppender, RealFilesystem
from headwater.storage.journaled_store import JournaledStorage
from headwater.storage.worker import Job
from tests.storage.acid.driver import Driver, open_acid

PRODUCERS = [f"producer-{n}" for n in range(6)]
STREAMS = ["left", "right", "middle"]
SHARDS = 4

Batch = list[tuple[Record, tuple[int, ...]]]
encode_batch = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(Batch).decode


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def stream_of(producer: str) -> str:
    return STREAMS[PRODUCERS.index(producer) % len(STREAMS)]


def message(producer: str, seq: int) -> bytes:
    """Build a producer's message; the lengths vary, so that pieces and batches do too."""
    return f"{producer}:{seq};".encode() + b"." * (seq * 7 % 90) + b"\n"


class Writer:
    def __init__(self, directory: Path, seed: int, resume: dict[str, int]) -> None:
        self.random = random.Random(seed)
        self.storage = open_store(directory, self.random)
        self.driver = Driver([self.storage], ids=random.Random(f"ids of {seed}"))
        self.driver.recover(self.storage)
        self.acknowledged = dict(resume)
        self.acknowledge_first = False

    def run(self, batches: int) -> None:
        say("ready")
        for name in STREAMS:
            if name not in self.driver.catalog.by_name:
                self.driver.create(name)
        done = 0
        while not batches or done < batches:
            answered = self.produce()
            self.change_other_streams()
            if self.driver.queue:
                self.commit(answered)
                done += 1

    def produce(self) -> dict[str, int]:
        """Append the next message of some producers; a duplicate counts as answered once the batch is durable."""
        answered: dict[str, int] = {}
        for producer in self.random.sample(PRODUCERS, self.random.randint(1, len(PRODUCERS))):
            stream = self.driver.catalog.by_name[stream_of(producer)]
            seq = self.acknowledged.get(producer, -1) + 1
            decision = decide_append(
                stream, "text/plain", message(producer, seq), ProducerHeaders(producer, 0, seq), None, False, 1
            )
            if isinstance(decision, Append):
                self.driver.append(stream, [decision.payload], producer=(producer, 0, seq))
            else:
                assert decision is AppendOutcome.DUPLICATE
            answered[producer] = seq
        return answered

    def change_other_streams(self) -> None:
        """Change streams without producers: create, fork, close and delete some, and write documents."""
        dice = self.random
        driver = self.driver
        short_lived = [stream for stream in driver.catalog if stream.name not in STREAMS and not stream.deleted]
        if dice.random() < 0.3 and len(short_lived) < 8:
            fresh = driver.create(f"brief-{dice.getrandbits(40):x}", [b"first"])
            driver.append(fresh, [b"x" * dice.randint(1, 400)] * dice.randint(1, 5), close=dice.random() < 0.5)
        if not short_lived:
            return
        stream = dice.choice(short_lived)
        if dice.random() < 0.3:
            self.try_closed(stream)
        if dice.random() < 0.2:
            point = ForkPoint(stream.id, stream.name, stream.message_index, stream.byte_position)
            driver.create(f"brief-{dice.getrandbits(40):x}", [b"forked"], fork=point)
        if dice.random() < 0.3:
            driver.delete(stream)
        if dice.random() < 0.3:
            driver.document(f"key-{dice.randint(0, 3)}", dice.choice([None, b"value-%d" % dice.randint(0, 99)]))

    def try_closed(self, stream: StreamState) -> None:
        mark = f"REJECTED-{self.random.getrandbits(40):x}"
        try:
            decision = decide_append(stream, "text/plain", mark.encode(), None, None, False, 1)
        except Refusal:
            say("reject", mark)
        else:
            assert isinstance(decision, Append)

    def commit(self, answered: dict[str, int]) -> None:
        batch = [(record, removed) for record, removed in self.driver.queue]
        say("try", base64.b64encode(encode_batch(batch)).decode())
        self.acknowledged |= answered
        acknowledgement = json.dumps(answered)
        if self.acknowledge_first:
            say("ack", acknowledgement)
            time.sleep(0.003)
        self.driver.commit()
        if not self.acknowledge_first:
            say("ack", acknowledgement)


def open_store(directory: Path, dice: random.Random) -> JournaledStorage:
    """Open a store with small pieces, rounds, segments and hot tail and early checkpoints."""
    pieces.PIECE_BYTES = 200  # type: ignore[misc]
    shard.REAPED_AT_ONCE = 4  # type: ignore[misc]
    shard_store.ROUND_BYTES = dice.choice([10_000, 100_000, 1_000_000])  # type: ignore[misc]
    return open_acid(
        directory,
        SHARDS,
        2**26,
        dice.choice([1, 2_000, 60_000]),
        save_after_s=dice.choice([0.0, 0.005, 0.05]),
        segment_bytes=dice.choice([500, 5_000, 100_000]),
    )


# -- stores that are broken on purpose -----------------------------------------------------------------------------


def acknowledge_before_commit(writer: Writer) -> None:
    writer.acknowledge_first = True


def producers_in_another_transaction(_: Writer) -> None:
    """T-1: write data and producer state in separate transactions."""
    apply = shard.Shard.apply

    def apply_twice(self: shard.Shard, lsn: int, changes: Sequence[shard.ShardChange]) -> list[shard.Reached]:
        appends = [change.record for change in changes if isinstance(change.record, Append)]
        bare = [
            change._replace(record=msgspec.structs.replace(change.record, producer_id=None))
            if isinstance(change.record, Append)
            else change
            for change in changes
        ]
        reached = apply(self, lsn, bare)
        time.sleep(0.003)
        with self.environment.begin(write=True, buffers=True) as txn:
            work = Applier(txn, self.databases, self.path)
            for record in appends:
                if record.producer_id is None or txn.get(ID.pack(record.id), db=self.databases.streams) is None:
                    continue
                touched = work._touch(record.id)
                work._load_producer(touched, record.producer_id)
                known = (touched.stream.producers or {}).get(record.producer_id)
                state = remember(known, record.epoch, record.seq, record.digest, record.at_ms)
                touched.stream.producers = {**(touched.stream.producers or {}), record.producer_id: state}
            work.flush()
            ledger = shard.Ledger(lsn, (self.ledger.row_sum + work.row_sum) & shard.SUM_MASK)
            self._put_ledger(txn, ledger)
        self.ledger = ledger
        return reached

    shard.Shard.apply = apply_twice  # type: ignore[method-assign]


def trim_before_the_shards_are_updated(_: Writer) -> None:
    save_up_to = ShardStore._save_up_to

    def mark_then_apply(self: ShardStore, lsn: int, segment: int) -> Job:
        mark = self._current_mark(lsn, segment)
        write_mark(self._filesystem, self._root, self._manifest, mark)
        time.sleep(0.02)
        return save_up_to(self, lsn, segment)

    ShardStore._save_up_to = mark_then_apply  # type: ignore[method-assign]


def shards_in_two_transactions(_: Writer) -> None:
    """Write the rows and pieces of a shard in one transaction and its ledger in another."""
    put_ledger = shard.Shard._put_ledger
    apply = shard.Shard.apply

    def apply_then_ledger(self: shard.Shard, lsn: int, changes: Sequence[shard.ShardChange]) -> list[shard.Reached]:
        shard.Shard._put_ledger = lambda *_: None  # type: ignore[method-assign]
        reached = apply(self, lsn, changes)
        time.sleep(0.003)
        with self.environment.begin(write=True, buffers=True) as txn:
            put_ledger(self, txn, self.ledger)
        return reached

    shard.Shard.apply = apply_then_ledger  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[Writer], None]] = {
    fault.__name__: fault
    for fault in (
        acknowledge_before_commit,
        producers_in_another_transaction,
        trim_before_the_shards_are_updated,
        shards_in_two_transactions,
    )
}


LAX: dict[str, dict[str, bool]] = {"no_sync": {"sync": False}, "no_metasync": {"metasync": False}}
"""Faults that omit a sync. A kill cannot show them, but a power cut does."""


UNSYNCED: dict[str, str] = {"journal_not_synced": ".log", "checkpoint_file_not_synced": "checkpoint.new"}
"""Faults that never sync one kind of file."""


def do_not_sync(suffix: str) -> None:
    """Never sync files whose name ends with this suffix."""
    create = RealFilesystem.create

    def careless(self: RealFilesystem, path: Path) -> FileAppender:
        appender = create(self, path)
        if path.name.endswith(suffix):
            appender = Unsynced(appender)
        return appender

    RealFilesystem.create = careless  # type: ignore[method-assign]


class Unsynced:
    def __init__(self, appender: FileAppender) -> None:
        self.write = appender.write
        self.write_parts = appender.write_parts
        self.allocate = appender.allocate
        self.close = appender.close

    def sync(self) -> None:
        """Do nothing: the sync is omitted."""


def open_lax(options: dict[str, bool]) -> None:
    lmdb.open = lambda path, **others: lmdb.Environment(path, **others | options)  # type: ignore[assignment]


def main() -> None:
    directory, seed, resume, batches, *fault = sys.argv[1:]
    if fault and fault[0] in LAX:
        open_lax(LAX[fault[0]])
    if fault and fault[0] in UNSYNCED:
        do_not_sync(UNSYNCED[fault[0]])
    writer = Writer(Path(directory), int(seed), json.loads(resume))
    if fault and fault[0] in FAULTS:
        FAULTS[fault[0]](writer)
    writer.run(int(batches))
    os._exit(0)


if __name__ == "__main__":
    main()
