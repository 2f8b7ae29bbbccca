"""A store of the log as it lies on the disk, looked at without changing anything.

For commands: to check it, to count what it holds, to copy from it. The directory must not be written to meanwhile, so
whoever looks has it locked. What a crash left torn is passed over, exactly as the next start would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from headwater.core.catalog import StreamState
from headwater.core.floors import floors, own_start
from headwater.core.records import Record
from headwater.storage import extents, stream_data
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.packs.manifest import Manifest
from headwater.storage.packs.pack_set import PackSet
from headwater.storage.packs.recovery import PACKS_NAME, Recovery, name_of
from headwater.storage.stream_data import DamagedRangeError, StreamData

T = TypeVar("T")


class PackReader:
    """Run `recover` to its end; then everything can be read."""

    def __init__(self, filesystem: Filesystem, directory: Path) -> None:
        self._filesystem = filesystem
        self._path = directory
        self.manifest: Final = Manifest(filesystem, directory)
        self.pack_set: Final = PackSet(filesystem, directory / PACKS_NAME)
        self.streams: dict[int, StreamData] = {}

    def recover(self) -> Iterator[Record]:
        recovery = Recovery(self._filesystem, self._path, self.manifest)
        try:
            yield from recovery.records()
        except OSError as error:
            raise StorageError(f"Data directory {self._path} cannot be read: {error}") from error
        self.streams = recovery.streams
        for info in self.manifest.packs.values():
            self.pack_set.add(info)
        for stored in self.streams.values():
            self.pack_set.hold(stored.extents)

    def cut(self, stream_id: int, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        stored = self.streams[stream_id]
        return self._guarded(
            stream_id, lambda: stream_data.cut(stored, self.pack_set, index, position, end_index, max_bytes)
        )

    def lengths(self, stream_id: int, index: int, end_index: int) -> Sequence[int]:
        stored = self.streams[stream_id]
        return self._guarded(stream_id, lambda: stream_data.lengths(stored, self.pack_set, index, end_index))

    def read(self, stream_id: int, position: int, end_position: int) -> Sequence[bytes | memoryview]:
        stored = self.streams[stream_id]
        return self._guarded(stream_id, lambda: stream_data.read(stored, self.pack_set, position, end_position))

    def gaps(self, streams: Iterable[StreamState]) -> Iterator[str]:
        """Each stream whose bytes do not reach from where it can still be read to where it ends, without a gap."""
        streams = tuple(streams)
        floor_of = floors(streams)
        for stream in streams:
            stored = self.streams.get(stream.id)
            if stored is None:
                yield f"Stream {stream.name!r}: the store knows nothing of its bytes."
                continue
            start = own_start(stream, floor_of[stream.id]).byte_position
            if stored.base_position > start:
                yield f"Stream {stream.name!r}: its bytes from position {start} to {stored.base_position} are missing."
            if stored.end != (stream.message_index, stream.byte_position):
                yield (
                    f"Stream {stream.name!r} ends at position {stream.byte_position} after {stream.message_index}"
                    f" messages, but its bytes end at {stored.end[1]} after {stored.end[0]}."
                )
            at = stored.base_index, stored.base_position
            for extent in extents.split(stored.extents):
                if (extent.first_index, extent.position) != at:
                    yield f"Stream {stream.name!r}: bytes are missing or double before position {extent.position}."
                at = extent.end_index, extent.end_position

    def close(self) -> None:
        self.pack_set.close()
        self.manifest.close()

    def _guarded(self, stream_id: int, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except DamagedRangeError as damage:
            name = name_of(self.manifest, stream_id)
            raise CorruptError(f"{name} is damaged at position {damage.position}: {damage}") from damage
