"""The oracle: what a store must contain after a crash, according to the output of the process that used it.

There are three outcomes. Acknowledged: present, complete, in order and once. Unknown (the batch being written): all of
it or nothing. Rejected: absent. The oracle applies the batches that the process announced to a catalog and a `memory`
store. In addition, every producer's messages must be present exactly once without a gap, and `check` must find nothing.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from headwater.core.catalog import Catalog, StreamState
from headwater.storage.interface import Committed, StorageError
from headwater.storage.journaled_store import JournaledStorage
from headwater.storage.memory import MemoryStorage
from headwater.storage.offline.check import check
from tests.storage.acid.crash_child import PRODUCERS, SHARDS, Batch, decode_batch, message, stream_of
from tests.storage.acid.driver import State, messages_of, open_acid, state_of


class Violation(AssertionError):
    """The store broke one of its guarantees."""


class Oracle:
    """The expected content of the store: everything acknowledged, and perhaps one more batch."""

    def __init__(self) -> None:
        self.catalog: Catalog[StreamState] = Catalog(StreamState)
        self.bytes = MemoryStorage()
        self.unknown: Batch | None = None
        self.acknowledged: dict[str, int] = {}
        self.rejected: set[bytes] = set()

    def read_line(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "try":
            assert self.unknown is None
            self.unknown = decode_batch(base64.b64decode(rest))
        elif word == "ack":
            self.adopt()
            self.acknowledged |= json.loads(rest)
        elif word == "reject":
            self.rejected.add(rest.encode())
        else:
            assert line == "ready", line

    def adopt(self) -> None:
        """Accept the unknown batch as stored."""
        assert self.unknown is not None
        batch = [Committed(record, removed) for record, removed in self.unknown]
        for record, removed in batch:
            assert self.catalog.apply(record) == removed
        self.bytes.publish(batch)
        self.unknown = None

    def check(self, directory: Path) -> None:
        """Compare with the state that a start recovers, and decide whether the unknown batch was stored."""
        catalog: Catalog[StreamState] = Catalog(StreamState)
        try:
            store = open_acid(directory, SHARDS, 2**26, 2**20)
            try:
                for record in store.recover():
                    catalog.apply(record)
                self._check(store, state_of(catalog))
                for producer in PRODUCERS:
                    self._check_producer(store, catalog, producer)
            finally:
                store.close()
        except StorageError as error:
            raise Violation(f"the store does not reopen: {error}") from error
        problems = list(check(directory))
        if problems:
            raise Violation(f"the offline check found {problems}")

    def _check(self, store: JournaledStorage, found: State) -> None:
        if found != state_of(self.catalog) and self.unknown is not None:
            self.adopt()
        self.unknown = None
        if found != state_of(self.catalog):
            raise Violation("the states of the streams match neither with nor without the unknown batch")
        for stream in self.catalog:
            there = messages_of(store, stream)
            if there != messages_of(self.bytes, stream):
                raise Violation(f"the messages of {stream.name!r} differ from the acknowledged ones")
            if any(text in self.rejected for text in there):
                raise Violation(f"{stream.name!r} contains a rejected message")

    def _check_producer(self, store: JournaledStorage, catalog: Catalog[StreamState], producer: str) -> None:
        stream = catalog.by_name.get(stream_of(producer))
        if stream is None:
            assert producer not in self.acknowledged
            return
        there = [text for text in messages_of(store, stream) if text.startswith(f"{producer}:".encode())]
        if there != [message(producer, seq) for seq in range(len(there))]:
            raise Violation(f"the messages of {producer} are not present once each and in order")
        if len(there) <= self.acknowledged.get(producer, -1):
            raise Violation(f"{producer} lost an acknowledged message")
        # Its next process continues after the last answered message; messages stored beyond it are duplicates.
