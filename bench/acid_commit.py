"""The cost of making a batch durable: a plain log, LMDB in each shard, and `acid`. Ratios within one run.

    python -m bench.acid_commit [--directory DIR] [--rounds N] [--streams N]

The methods get the same batches in turn, so that other load on the machine affects all of them:

- `log`: append the encoded batch to a file, fdatasync. The minimum cost of `file-durable`.
- `shards, one by one`: one LMDB transaction in every shard that the batch touches.
- `shards, threads`: the same, committed by a pool of threads (py-lmdb releases the GIL in a commit).
- `acid`: one synced append to the journal; checkpoints apply it to the shards in the background.

With every method an acknowledged write survives a power failure; none of LMDB's syncs is disabled.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import lmdb

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Append, Create, encode_record
from headwater.storage.acid.layout import shard_of
from headwater.storage.acid.shard_store import acid_storage
from headwater.storage.interface import Committed

MAP_BYTES = 2**36
PAYLOAD = b"x" * 100


class CommitMethod(Protocol):
    """A method to make batches durable."""

    def write(self, batch: Sequence[Committed]) -> None: ...

    def close(self) -> None: ...


class Log:
    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory / "log", os.O_CREAT | os.O_WRONLY)

    def write(self, batch: Sequence[Committed]) -> None:
        os.write(self._descriptor, b"".join(encode_record(record) for record, _ in batch))
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Shards:
    """Write data and state directly to the shards, the simplest method."""

    def __init__(self, directory: Path, count: int, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool
        self._count = count
        self._environments = []
        for number in range(count):
            path = directory / f"{'pool' if pool else 'alone'}-{number:02x}"
            path.mkdir()
            environment = lmdb.open(str(path), map_size=MAP_BYTES, max_dbs=2)
            self._environments.append((environment, environment.open_db(b"data"), environment.open_db(b"state")))
        self._shard_of: dict[int, int] = {}

    def write(self, batch: Sequence[Committed]) -> None:
        by_shard: dict[int, list[Append | Create]] = {}
        for record, _ in batch:
            if isinstance(record, Create):
                self._shard_of[record.id] = shard_of(record.name, self._count)
            if isinstance(record, Create | Append):
                by_shard.setdefault(self._shard_of[record.id], []).append(record)
        if self._pool is None:
            for shard, records in by_shard.items():
                self._commit(shard, records)
        else:
            list(self._pool.map(self._commit, by_shard.keys(), by_shard.values()))

    def _commit(self, shard: int, records: Sequence[Append | Create]) -> None:
        environment, data, state = self._environments[shard]
        with environment.begin(write=True) as txn:
            for record in records:
                key = record.id.to_bytes(8, "big")
                position = record.byte_position if isinstance(record, Append) else 0
                txn.put(key + position.to_bytes(8, "big"), record.payload, db=data)
                txn.put(key, encode_record(record)[:60], db=state)

    def close(self) -> None:
        for environment, _, _ in self._environments:
            environment.close()


class Acid:
    def __init__(self, directory: Path, count: int) -> None:
        self.storage = acid_storage(directory / "acid-store", count, MAP_BYTES)
        list(self.storage.recover())

    def write(self, batch: Sequence[Committed]) -> None:
        self.storage.write(batch)
        self.storage.publish(batch)
        self.storage.maintain(lambda _: None)

    def close(self) -> None:
        self.storage.close()


def batches(connections: int, streams: int, rounds: int) -> list[list[Committed]]:
    """In each round every connection appends once, to a random stream."""
    catalog: Catalog[StreamState] = Catalog(StreamState)
    made: list[list[Committed]] = [[]]
    for number in range(streams):
        create = Create(random.getrandbits(63), f"stream-{number}", 0, "text/plain")
        catalog.apply(create)
        made[0].append(Committed(create))
    everyone = list(catalog)
    for _ in range(rounds):
        batch = []
        for _ in range(connections):
            stream = random.choice(everyone)
            tail = stream.tail
            lengths = (len(PAYLOAD),)
            record = Append(stream.id, 0, tail.message_index, tail.byte_position, PAYLOAD, lengths, "producer", 0, 0)
            catalog.apply(record)
            batch.append(Committed(record))
        made.append(batch)
    return made


def measure(directory: Path, shards: int, connections: int, streams: int, rounds: int) -> None:
    with ThreadPoolExecutor(shards) as pool:
        methods: dict[str, CommitMethod] = {
            "log": Log(directory),
            "shards, one by one": Shards(directory, shards, None),
            "shards, threads": Shards(directory, shards, pool),
            "acid": Acid(directory, shards),
        }
        spent: dict[str, list[float]] = {name: [] for name in methods}
        for batch in batches(connections, streams, rounds):
            for name, method in methods.items():
                started = time.perf_counter()
                method.write(batch)
                spent[name].append(time.perf_counter() - started)
        for method in methods.values():
            method.close()
    base = statistics.mean(spent["log"][1:])
    print(f"{connections} connections, {streams} streams, {shards} shards: milliseconds per batch")
    for name, times in spent.items():
        mean, p50, p99 = statistics.mean(times[1:]), statistics.median(times[1:]), sorted(times[1:])[rounds * 99 // 100]
        print(
            f"  {name:20} mean {mean * 1e3:6.2f}  p50 {p50 * 1e3:6.2f}  p99 {p99 * 1e3:6.2f}"
            f"  {connections / mean:8.0f} appends/s  {base / mean:5.2f} of the log"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--shards", type=int, default=16)
    arguments = parser.parse_args()
    for connections in (1, 32, 128):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            measure(Path(directory), arguments.shards, connections, arguments.streams, arguments.rounds)


if __name__ == "__main__":
    main()
