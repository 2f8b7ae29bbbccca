"""The interface of a replicated journal, which keeps the batches of a store if this machine is lost.

The file journal writes each batch there first, so the local file is only a copy for checkpoints. A store whose
local files are lost is restored from the object store and from the replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from headwater.storage.filesystem import Bytes


class JournalSource(Protocol):
    """The journal of one store, for reading. All calls block."""

    @property
    def last_lsn(self) -> int:
        """The last record that it had when it was opened."""

    def batches(self, after_lsn: int) -> Iterator[bytearray]:
        """The sealed frames that have records after this one, in order."""


class JournalReplica(JournalSource, Protocol):
    """The journal of one store, with one writer. All calls block."""

    def append(self, last_lsn: int, new_lsn: int, frame: Sequence[Bytes]) -> None:
        """Make a batch durable that follows record `last_lsn` and ends with `new_lsn`.

        Raises `WriteFailedError` if that is not certain, or if this process is no longer the writer.
        """

    def trim(self, lsn: int) -> None:
        """Remove the batches up to this record, which the object store has. Does nothing if there is another writer."""
