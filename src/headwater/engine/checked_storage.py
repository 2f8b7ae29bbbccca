"""Translate storage errors to refusals; the engine reads stored data only through this module.

Data that fails its checksum is refused with `data_corrupt` by every operation. The store's own message names files
and positions, so it is logged (once per stream) and not sent to the client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from headwater.core.errors import DataCorrupt, Refusal, StorageUnavailable
from headwater.engine.cold_reads import ColdRead
from headwater.engine.stream import LiveStream
from headwater.storage.arrival_times import TimeRun
from headwater.storage.interface import CorruptError, Storage, StorageError
from headwater.storage.tiering.block_cache import NotLocalError

log = logging.getLogger("headwater.engine")


class CheckedStorage:
    """The read operations of a storage mode, with translated errors."""

    def __init__(self, storage: Storage, by_id: Mapping[int, LiveStream]) -> None:
        self._storage = storage
        self._by_id = by_id
        self._reported: set[int] = set()

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
        if isinstance(error, NotLocalError):
            return ColdRead(name, error)
        if stream_id not in self._reported:
            self._reported.add(stream_id)
            log.error("stored data of stream %r cannot be read: %s", name, error)
        if isinstance(error, CorruptError):
            return DataCorrupt(
                f"Stored data of stream {name!r} fails its checksum and is not served; check the disk, and restore a"
                " backup."
            )
        return StorageUnavailable(f"Stored data of stream {name!r} cannot be read at the moment; retry later.")
