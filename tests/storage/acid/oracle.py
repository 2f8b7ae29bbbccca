"""The oracle: what a store must hold after a crash, by what the process that used it had said.

It knows three outcomes. Acknowledged: there, whole, in order, once. Unknown (the batch that was on its way): all of it
or nothing of it. Rejected: absent. It is a catalog and a `memory` store that are fed what the process said it would
write; besides, every producer's messages must be found exactly once and without a gap, and `check` must find nothing.
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
from tests.storage.acid.driving import State, messages_of, open_acid, state_of
from tests.storage.acid.victim import PRODUCERS, SHARDS, Batch, decode_batch, message, stream_of


class Violation(AssertionError):
    """The store broke its promise."""


class Oracle:
    """What must be in the store: everything acknowledged, and perhaps one batch more."""

    def __init__(self) -> None:
        self.catalog: Catalog[StreamState] = Catalog(StreamState)
        self.bytes = MemoryStorage()
        self.unknown: Batch | None = None
        self.acknowledged: dict[str, int] = {}
        self.rejected: set[bytes] = set()

    def hear(self, line: str) -> None:
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
        """The unknown batch is there after all."""
        assert self.unknown is not None
        batch = [Committed(record, removed) for record, removed in self.unknown]
        for record, removed in batch:
            assert self.catalog.apply(record) == removed
        self.bytes.publish(batch)
        self.unknown = None

    def judge(self, directory: Path) -> None:
        """Compare with what a boot finds; settles the unknown batch by what is there."""
        catalog: Catalog[StreamState] = Catalog(StreamState)
        try:
            store = open_acid(directory, SHARDS, 2**26, 2**20)
            try:
                for record in store.recover():
                    catalog.apply(record)
                self._judge(store, state_of(catalog))
                for producer in PRODUCERS:
                    self._judge_producer(store, catalog, producer)
            finally:
                store.close()
        except StorageError as error:
            raise Violation(f"the store does not open again: {error}") from error
        problems = list(check(directory))
        if problems:
            raise Violation(f"the check finds {problems}")

    def _judge(self, store: JournaledStorage, found: State) -> None:
        if found != state_of(self.catalog) and self.unknown is not None:
            self.adopt()
        self.unknown = None
        if found != state_of(self.catalog):
            raise Violation("the states of the streams are neither with nor without the batch that was on its way")
        for stream in self.catalog:
            there = messages_of(store, stream)
            if there != messages_of(self.bytes, stream):
                raise Violation(f"the messages of {stream.name!r} are not those that were acknowledged")
            if any(text in self.rejected for text in there):
                raise Violation(f"{stream.name!r} holds what was rejected")

    def _judge_producer(self, store: JournaledStorage, catalog: Catalog[StreamState], producer: str) -> None:
        stream = catalog.by_name.get(stream_of(producer))
        if stream is None:
            assert producer not in self.acknowledged
            return
        there = [text for text in messages_of(store, stream) if text.startswith(f"{producer}:".encode())]
        if there != [message(producer, seq) for seq in range(len(there))]:
            raise Violation(f"the messages of {producer} are not there once each and in order")
        if len(there) <= self.acknowledged.get(producer, -1):
            raise Violation(f"{producer} lost what was acknowledged")
        # Its next process knows of no more than was answered, and finds the rest as duplicates.
