"""The storage interface: where committed records become durable, and bytes become readable.

The engine drives every mode in the same way and order:

1. `recover()` once, before anything else: the records that rebuild the catalog.
2. `write(batch)`: make a batch durable. After an error it is unknown how much of it is durable. A batch that is too
   large is refused with `BatchTooLargeError` before any of it is written. `write` may block and may run on a thread,
   one batch at a time; it must not change data that readers use. It waits for its own write and sync, but never for a
   checkpoint: while checkpoints cannot keep up, `busy` returns the reason.
3. `publish(batch)`: on the event loop, after `write` returned: make the batch readable.
4. `maintain(image_of)`: on the event loop, after each publish and about once a second: run checkpoints and other
   maintenance. It must return at once; long work runs on the store's worker, in small steps.

Reads happen on the event loop between publishes, and see only published data. A `message_index` counts messages, a
`byte_position` stored bytes; both are absolute: the first byte of a fork's own data has the byte position of its fork
point. A storage mode knows one incarnation at a time; the engine knows how forks share bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from headwater.core.records import Append, Create, Image, Record
from headwater.storage.arrival_times import TimeRun


class StorageError(Exception):
    """A storage operation failed. The message says what failed and where."""


class WriteFailedError(StorageError):
    """A write or sync failed. How much of the batch is on the disk is unknown, so no more writes are acknowledged."""


class ReplicaFailedError(WriteFailedError):
    """As `WriteFailedError`, in a store whose journal is replicated: the process ends, and the store is opened again,
    here or on another node."""


class BatchTooLargeError(StorageError):
    """A batch is too large for a journal. None of it was written, and the store accepts further writes."""


class CorruptError(StorageError):
    """Stored bytes do not match their checksum or index. They are never served."""


class Committed(NamedTuple):
    """A record to be written, with the incarnations that it removes permanently."""

    record: Record
    removed: tuple[int, ...] = ()


class Usage(NamedTuple):
    """The size of a store's content, for metrics and limits."""

    payload_bytes: int
    memory_bytes: int


RECORD_MAX_BYTES: Final = 2**31 - 2**20
"""Maximum of payload and message lengths in one record, for every journal. Larger requests must be refused earlier."""

BATCH_MAX_BYTES: Final = 2**32 - 2**24
"""Maximum of payloads and message lengths in one batch; it leaves space for the other fields of the records."""
_LENGTH_MAX_BYTES: Final = 9


def check_batch(batch: Sequence[Committed]) -> None:
    """Raise `BatchTooLargeError` for a batch that no journal accepts, before anything is encoded or written."""
    total = 0
    for record, _ in batch:
        if type(record) is Append or type(record) is Create:
            size = len(record.payload) + _LENGTH_MAX_BYTES * len(record.lengths)
            if size > RECORD_MAX_BYTES:
                raise BatchTooLargeError(
                    f"A record of {size} bytes exceeds the limit of storage, {RECORD_MAX_BYTES}; send less at once."
                )
            total += size
    if total > BATCH_MAX_BYTES:
        raise BatchTooLargeError(
            f"A batch of {total} bytes exceeds the limit of storage, {BATCH_MAX_BYTES}; send less at once."
        )


ImageOf: TypeAlias = Callable[[int], Image | None]
"""The state of a stream as published; None if it has records that are not published yet, or was removed."""


class Storage(Protocol):
    """One storage mode."""

    @property
    def waits_for_disk(self) -> bool:
        """Whether `write` does I/O: if so, writes are collected in batches, which may be written on a thread."""

    def recover(self) -> Iterable[Record]: ...

    def takes_long(self) -> bool:
        """Whether the next `write` waits for more than one sync. Called directly before it, never on a thread."""

    def write(self, batch: Sequence[Committed]) -> None: ...

    def publish(self, batch: Sequence[Committed]) -> None: ...

    def boundary(self, stream_id: int, message_index: int) -> int | None:
        """Byte position after `message_index` messages; None outside the incarnation's own data (base excluded)."""

    def cut(
        self, stream_id: int, message_index: int, byte_position: int, end_index: int, max_bytes: int
    ) -> tuple[int, int]:
        """The last boundary within `max_bytes` of (message_index, byte_position), at least one message further, at most
        `end_index`."""

    def lengths(self, stream_id: int, message_index: int, end_index: int) -> Sequence[int]:
        """The lengths of the messages from `message_index` to `end_index`."""

    def arrivals(self, stream_id: int, message_index: int, end_index: int) -> Sequence[TimeRun]:
        """The arrival times of the messages from `message_index` to `end_index`."""

    def first_since(self, stream_id: int, at_ms: int) -> int:
        """The index of the first message that arrived at `at_ms` or later; the end of the stream if there is none.

        Messages of unknown time count as earlier than all others.
        """

    def read(self, stream_id: int, byte_position: int, end_position: int) -> Sequence[bytes | memoryview]:
        """The bytes from `byte_position` to `end_position`, in order, in the pieces in which they are stored."""

    def trim(self, stream_id: int, message_index: int, byte_position: int) -> None:
        """Free the bytes before this boundary, which are no longer read: in memory now, on disk soon.

        The boundary itself can still be resolved. It is within the published data, and never moves back. Nothing has
        to be recorded: after a restart the engine trims again.
        """

    def maintain(self, image_of: ImageOf) -> None: ...

    def refusal(self) -> str | None:
        """Why new writes should be refused before they begin (a disk nearly full), or None."""

    def busy(self) -> str | None:
        """Why new writes should be retried shortly (too much unsaved data in memory), or None."""

    def usage(self) -> Usage: ...

    def close(self) -> None: ...
