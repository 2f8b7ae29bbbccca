"""A journal that is not a file: where the batches of a store are kept so that they survive this machine.

The file journal writes each batch there first, so the local file is only a copy that checkpoints read. A store whose
local files are gone is restored from the object store and from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from headwater.storage.filesystem import Bytes


class JournalSource(Protocol):
    """The journal of one store, for reading. All calls block."""

    @property
    def last_lsn(self) -> int:
        """The last record that it has, as of the opening."""

    def batches(self, after_lsn: int) -> Iterator[bytearray]:
        """The sealed frames that have records after this one, in order."""


class JournalReplica(JournalSource, Protocol):
    """The journal of one store, with one writer. All calls block."""

    def append(self, last_lsn: int, new_lsn: int, frame: Sequence[Bytes]) -> None:
        """Make a batch durable that follows record `last_lsn` and ends with `new_lsn`.

        Raises `WriteFailedError` if that is not certain, or if this process is not the writer any more.
        """

    def trim(self, lsn: int) -> None:
        """Remove the batches up to this record: the object store has them. Nothing if the writer is another one."""
