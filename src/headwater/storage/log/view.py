"""A store of the log as it lies on the disk, looked at without changing anything.

For commands: to check it, to count what it holds, to copy from it. The directory must not be written to meanwhile, so
whoever looks has it locked. What a crash left torn is passed over, exactly as the next start would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from headwater.core.catalog import Stream
from headwater.core.floors import floors, own_start
from headwater.core.records import Record
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import Corrupt, StorageError
from headwater.storage.log import extents, holdings
from headwater.storage.log.holdings import Damaged, Holding
from headwater.storage.log.manifest import Manifest
from headwater.storage.log.recovery import PACKS_NAME, Recovery, name_of
from headwater.storage.log.shelf import Shelf

T = TypeVar("T")


class LogView:
    """Run `recover` to its end; then everything can be read."""

    def __init__(self, filesystem: Filesystem, directory: Path) -> None:
        self._filesystem = filesystem
        self._path = directory
        self.manifest: Final = Manifest(filesystem, directory)
        self.shelf: Final = Shelf(filesystem, directory / PACKS_NAME)
        self.holdings: dict[int, Holding] = {}

    def recover(self) -> Iterator[Record]:
        recovery = Recovery(self._filesystem, self._path, self.manifest)
        try:
            yield from recovery.records()
        except OSError as error:
            raise StorageError(f"Data directory {self._path} cannot be read: {error}") from error
        self.holdings = recovery.holdings
        for info in self.manifest.packs.values():
            self.shelf.add(info)
        for holding in self.holdings.values():
            self.shelf.hold(holding.extents)

    def cut(self, stream_id: int, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        holding = self.holdings[stream_id]
        return self._guarded(
            stream_id, lambda: holdings.cut(holding, self.shelf, index, position, end_index, max_bytes)
        )

    def lengths(self, stream_id: int, index: int, end_index: int) -> Sequence[int]:
        holding = self.holdings[stream_id]
        return self._guarded(stream_id, lambda: holdings.lengths(holding, self.shelf, index, end_index))

    def read(self, stream_id: int, position: int, end_position: int) -> Sequence[bytes | memoryview]:
        holding = self.holdings[stream_id]
        return self._guarded(stream_id, lambda: holdings.read(holding, self.shelf, position, end_position))

    def gaps(self, streams: Iterable[Stream]) -> Iterator[str]:
        """Each stream whose bytes do not reach from where it can still be read to where it ends, without a gap."""
        streams = tuple(streams)
        floor_of = floors(streams)
        for stream in streams:
            holding = self.holdings.get(stream.id)
            if holding is None:
                yield f"Stream {stream.name!r}: the store knows nothing of its bytes."
                continue
            start = own_start(stream, floor_of[stream.id]).position
            if holding.base_position > start:
                yield f"Stream {stream.name!r}: its bytes from position {start} to {holding.base_position} are missing."
            if holding.end != (stream.index, stream.position):
                yield (
                    f"Stream {stream.name!r} ends at position {stream.position} after {stream.index} messages, but its"
                    f" bytes end at {holding.end[1]} after {holding.end[0]}."
                )
            at = holding.base_index, holding.base_position
            for extent in extents.split(holding.extents):
                if (extent.first_index, extent.position) != at:
                    yield f"Stream {stream.name!r}: bytes are missing or double before position {extent.position}."
                at = extent.end_index, extent.end_position

    def close(self) -> None:
        self.shelf.close()
        self.manifest.close()

    def _guarded(self, stream_id: int, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except Damaged as damage:
            name = name_of(self.manifest, stream_id)
            raise Corrupt(f"{name} is damaged at position {damage.position}: {damage}") from damage
