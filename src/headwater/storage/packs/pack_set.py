"""The set of packs: which exist, how much of each is live, and which should be rewritten.

Packs of a tier are merged, eight at a time, into one of the next tier, so a stream has few extents after any number of
checkpoints, and each byte is rewritten once per tier. A large extent moves to a `BIG` pack, outside the tiers, which is
rewritten only when most of it is garbage. At most `open_max` packs are open for reading at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from headwater.storage.descriptor_reserve import EXHAUSTED
from headwater.storage.extents import EXTENT
from headwater.storage.filesystem import Filesystem
from headwater.storage.packs.pack import Pack, PackInfo

BIG: Final = 255
"""The tier of packs for large extents."""
TIER_MAX: Final = 8
FANOUT: Final = 8
OPEN_MAX: Final = 128


class Rewrite(NamedTuple):
    """Packs whose live data should move to new packs of `tier` (and large extents to a `BIG` one)."""

    sources: tuple[PackInfo, ...]
    tier: int


class PackSet:
    def __init__(self, filesystem: Filesystem, directory: Path, *, fanout: int = FANOUT, open_max: int = OPEN_MAX):
        self._filesystem = filesystem
        self._directory = directory
        self._fanout = fanout
        self._open_max = open_max
        self._open: OrderedDict[int, Pack] = OrderedDict()
        self._infos: dict[int, PackInfo] = {}
        self._live: dict[int, int] = {}
        self._incomplete: set[int] = set()
        self._excluded: set[int] = set()

    def __len__(self) -> int:
        return len(self._infos)

    @property
    def infos(self) -> Iterable[PackInfo]:
        return self._infos.values()

    @property
    def live_bytes(self) -> int:
        return sum(self._live.values())

    @property
    def data_bytes(self) -> int:
        return sum(info.data_bytes for info in self._infos.values())

    def add(self, info: PackInfo) -> None:
        """Add a pack that can be read. Until `complete`, its live extents are not all counted."""
        self._infos[info.number] = info
        self._live[info.number] = 0
        self._incomplete.add(info.number)

    def complete(self, infos: Iterable[PackInfo]) -> None:
        """Declare that all live extents in these packs are counted: the rest is garbage."""
        self._incomplete.difference_update(info.number for info in infos)

    def remove(self, number: int) -> None:
        """Remove a pack that is no longer referenced."""
        del self._infos[number], self._live[number]
        self._excluded.discard(number)
        self.close_packs((number,))

    def add_live(self, blob: bytes) -> None:
        """Count extents as live."""
        for pack, _, _, _, _, length in EXTENT.iter_unpack(blob):
            self._live[pack] += length

    def remove_live(self, blob: bytes) -> None:
        for pack, _, _, _, _, length in EXTENT.iter_unpack(blob):
            self._live[pack] -= length

    def exclude(self, numbers: Iterable[int]) -> None:
        """Do not rewrite these packs: they are damaged, and a copy would have a valid checksum."""
        self._excluded.update(numbers)

    def pack(self, number: int) -> Pack:
        """Open a pack; if too many are open, the least recently used one is closed."""
        pack = self._open.get(number)
        if pack is None:
            pack = self._opened(self._infos[number])
            self._open[number] = pack
            if len(self._open) > self._open_max:
                self._close_oldest()
        else:
            self._open.move_to_end(number)
        return pack

    def _opened(self, info: PackInfo) -> Pack:
        """Open a pack; without a free descriptor, others are closed for it."""
        while True:
            try:
                return Pack(self._filesystem, self._directory, info)
            except OSError as error:
                if error.errno not in EXHAUSTED or not self._open:
                    raise
                self._close_oldest()

    def _close_oldest(self) -> None:
        _, oldest = self._open.popitem(last=False)
        oldest.close()

    @property
    def recent(self) -> list[int]:
        """The open packs, the most recently used one last."""
        return list(self._open)

    def close_packs(self, numbers: Iterable[int]) -> None:
        """Close packs if they are open. They are opened again when they are read."""
        for number in numbers:
            pack = self._open.pop(number, None)
            if pack is not None:
                pack.close()

    def dead(self) -> tuple[int, ...]:
        """The packs without live data, including damaged ones: they can be removed unread."""
        return tuple(number for number, live in self._live.items() if not live and number not in self._incomplete)

    def next_rewrite(self) -> Rewrite | None:
        """The rewrite that saves the most now, or None."""
        tiers: dict[int, list[PackInfo]] = {}
        for info in self._infos.values():
            live = self._live[info.number]
            if not live or info.number in self._excluded or info.number in self._incomplete:
                continue
            if 2 * live < info.data_bytes:
                return Rewrite((info,), info.tier)
            if info.tier != BIG:
                tiers.setdefault(info.tier, []).append(info)
        for tier, infos in sorted(tiers.items()):
            if len(infos) >= self._fanout:
                infos.sort(key=lambda info: info.born)
                return Rewrite(tuple(infos[: self._fanout]), min(tier + 1, TIER_MAX))
        return None

    def close(self) -> None:
        for pack in self._open.values():
            pack.close()
        self._open.clear()
