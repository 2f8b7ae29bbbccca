"""The storage interface: where committed records become durable, and bytes become readable.

The engine drives every mode in the same way and order:

1. `recover()` once, before anything else: the records that rebuild the catalog.
2. `write(batch)`: make a batch durable. After an error it is unknown how much of it is. A batch that is too large is
   refused with `BatchTooLargeError` before anything of it is written. `write` may block and may run on a thread, one
   batch at a time; it must not touch what readers use. It waits for its own write and sync, and never for a checkpoint:
   while those cannot keep up, `busy` says so.
3. `publish(batch)`: on the event loop, after `write` returned: make the batch readable.
4. `maintain(image_of)`: on the event loop, after each publish and about once a second: time for checkpoints and the
   like. It must return at once; long work goes to the store's worker, in small steps.

Reads happen on the event loop between publishes, and only of what was published. Positions are absolute: the first
byte of a fork's own data has the position of its fork point. A storage mode knows one incarnation at a time; the
engine knows how forks share bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from headwater.core.records import Append, Create, Image, Record
from headwater.storage.arrival_times import TimeRun


class StorageError(Exception):
    """A storage operation failed. The message tells the operator what failed and where."""


class WriteFailedError(StorageError):
    """A write or sync failed. What of the batch is on the disk is unknown, so nothing more may be acknowledged."""


class BatchTooLargeError(StorageError):
    """A batch is too large for a journal. Nothing of it was written, and the store accepts further writes."""


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
"""The payload and message lengths of one record: every journal can take it. A larger request must be refused before."""

BATCH_MAX_BYTES: Final = 2**32 - 2**24
"""The payloads and message lengths of one batch: every journal can take it, with what else its records say."""
_LENGTH_MAX_BYTES: Final = 9


def check_batch(batch: Sequence[Committed]) -> None:
    """Raise `BatchTooLargeError` for a batch that no journal can take, before anything is encoded or written."""
    total = 0
    for record, _ in batch:
        if type(record) is Append or type(record) is Create:
            size = len(record.payload) + _LENGTH_MAX_BYTES * len(record.lengths)
            if size > RECORD_MAX_BYTES:
                raise BatchTooLargeError(
                    f"A record of {size} bytes is more than the {RECORD_MAX_BYTES} that storage can take."
                )
            total += size
    if total > BATCH_MAX_BYTES:
        raise BatchTooLargeError(f"A batch of {total} bytes is more than the {BATCH_MAX_BYTES} that storage can take.")


ImageOf: TypeAlias = Callable[[int], Image | None]
"""The state of a stream exactly as published so far; None while it is ahead of that, or removed."""


class Storage(Protocol):
    """One storage mode."""

    @property
    def waits_for_disk(self) -> bool:
        """Whether `write` has work to do: then batches are gathered, and may be written on a thread."""

    def recover(self) -> Iterable[Record]: ...

    def takes_long(self) -> bool:
        """Whether the next `write` waits for more than one sync; asked just before it, and never on a thread."""

    def write(self, batch: Sequence[Committed]) -> None: ...

    def publish(self, batch: Sequence[Committed]) -> None: ...

    def boundary(self, stream_id: int, index: int) -> int | None:
        """Position after `index` messages; None outside the incarnation's own data (base excluded)."""

    def cut(self, stream_id: int, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        """The last boundary within `max_bytes` of (index, position), at least one message on, at most `end_index`."""

    def lengths(self, stream_id: int, index: int, end_index: int) -> Sequence[int]:
        """The lengths of the messages from `index` to `end_index`."""

    def arrivals(self, stream_id: int, index: int, end_index: int) -> Sequence[TimeRun]:
        """When the messages from `index` to `end_index` arrived."""

    def first_since(self, stream_id: int, at_ms: int) -> int:
        """The index of the first message that arrived at `at_ms` or later; the end of the stream if there is none.

        Messages of unknown time count as earlier than all others.
        """

    def read(self, stream_id: int, position: int, end_position: int) -> Sequence[bytes | memoryview]:
        """The bytes from `position` to `end_position`, in order, in as many pieces as they are stored in."""

    def trim(self, stream_id: int, index: int, position: int) -> None:
        """Free the bytes before this boundary, in memory now and on disk soon: nothing reads them any more.

        The boundary itself stays known. It is within what was published, and never before an earlier one. Nothing has
        to be recorded: after a restart the engine trims again.
        """

    def maintain(self, image_of: ImageOf) -> None: ...

    def refusal(self) -> str | None:
        """Why new writes should be refused before they begin (a disk nearly full), or None."""

    def busy(self) -> str | None:
        """Why new writes should be tried again in a moment (memory is full of data still to be saved), or None."""

    def usage(self) -> Usage: ...

    def close(self) -> None: ...
