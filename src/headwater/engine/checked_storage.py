"""Translate storage errors to refusals; the engine reads streams and snapshots only through this module.

Data that fails its checksum is refused with `data_corrupt` by every operation. The store's own message names files
and positions, so it is logged (once per stream or snapshot) and not sent to the client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from headwater.core.errors import DataCorrupt, Refusal, StorageUnavailable
from headwater.core.records import SnapshotRef
from headwater.engine.cold_reads import ColdRead
from headwater.engine.stream import LiveStream
from headwater.storage.arrival_times import TimeRun
from headwater.storage.blobs import Blob, BlobStore
from headwater.storage.interface import CorruptError, Storage, StorageError
from headwater.storage.tiering.block_cache import NotLocalError

log = logging.getLogger("headwater.engine")


class _Translation:
    """Translates the errors of one kind of data, and logs the first temporary one and the first damage of each item."""

    def __init__(self, what: str, damage: str, remedy: str) -> None:
        self._what = what
        self._damage = damage
        self._remedy = remedy
        self._reported: set[tuple[int, bool]] = set()

    def refusal(self, item: int, name: str, error: StorageError) -> Refusal:
        """Return the refusal of a read of this item, which belongs to the stream `name`."""
        if isinstance(error, NotLocalError):
            return ColdRead(name, error)
        is_damage = isinstance(error, CorruptError)
        if (item, is_damage) not in self._reported:
            self._reported.add((item, is_damage))
            log.error("%s of stream %r cannot be read: %s", self._what, name, error)
        subject = f"{self._what[0].upper()}{self._what[1:]} of stream {name!r}"
        if is_damage:
            return DataCorrupt(f"{subject} {self._damage} and is not served; {self._remedy}.")
        return StorageUnavailable(f"{subject} cannot be read at the moment; retry later.")


class CheckedStorage:
    """The read operations of a storage mode, with translated errors.

    Each has its own `try`: unlike a context manager, it costs nothing when there is no error.
    """

    def __init__(self, storage: Storage, by_id: Mapping[int, LiveStream]) -> None:
        self._storage = storage
        self._by_id = by_id
        self._errors = _Translation("stored data", "fails its checksum", "check the disk, and restore a backup")

    def boundary(self, stream_id: int, message_index: int) -> int | None:
        try:
            return self._storage.boundary(stream_id, message_index)
        except StorageError as error:
            raise self._refusal(stream_id, error) from error

    def cut(
        self, stream_id: int, message_index: int, byte_position: int, end_index: int, max_bytes: int
    ) -> tuple[int, int]:
        try:
            return self._storage.cut(stream_id, message_index, byte_position, end_index, max_bytes)
        except StorageError as error:
            raise self._refusal(stream_id, error) from error

    def lengths(self, stream_id: int, message_index: int, end_index: int) -> Sequence[int]:
        try:
            return self._storage.lengths(stream_id, message_index, end_index)
        except StorageError as error:
            raise self._refusal(stream_id, error) from error

    def arrivals(self, stream_id: int, message_index: int, end_index: int) -> Sequence[TimeRun]:
        try:
            return self._storage.arrivals(stream_id, message_index, end_index)
        except StorageError as error:
            raise self._refusal(stream_id, error) from error

    def first_since(self, stream_id: int, at_ms: int) -> int:
        try:
            return self._storage.first_since(stream_id, at_ms)
        except StorageError as error:
            raise self._refusal(stream_id, error) from error

    def read(self, stream_id: int, byte_position: int, end_position: int) -> Sequence[bytes | memoryview]:
        try:
            return self._storage.read(stream_id, byte_position, end_position)
        except StorageError as error:
            raise self._refusal(stream_id, error) from error

    def _refusal(self, stream_id: int, error: StorageError) -> Refusal:
        stream = self._by_id.get(stream_id)
        name = stream.name if stream is not None else f"{stream_id:016x}"
        return self._errors.refusal(stream_id, name, error)


class CheckedBlobs:
    """The snapshots in a blob store, with translated errors."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._errors = _Translation("the snapshot", "is missing or damaged", "publish it again")

    def open(self, ref: SnapshotRef, name: str) -> CheckedBlob:
        """Open a snapshot of the stream `name`."""
        try:
            blob = self._blobs.open(ref.blob_id)
            if blob.size != ref.size:
                blob.close()
                raise CorruptError(f"it has {blob.size} bytes instead of {ref.size}")
        except StorageError as error:
            raise self._errors.refusal(ref.blob_id, name, error) from error
        return CheckedBlob(blob, ref.blob_id, name, self._errors)


class CheckedBlob:
    """An open snapshot."""

    __slots__ = ("_blob", "_errors", "_id", "_name")

    def __init__(self, blob: Blob, blob_id: int, name: str, errors: _Translation) -> None:
        self._blob = blob
        self._id = blob_id
        self._name = name
        self._errors = errors

    def read(self, byte_position: int, end_position: int) -> bytes:
        try:
            return self._blob.read(byte_position, end_position)
        except StorageError as error:
            raise self._errors.refusal(self._id, self._name, error) from error

    def close(self) -> None:
        self._blob.close()
