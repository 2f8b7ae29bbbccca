"""The set of packs: which exist, how much of each is live, and which should be rewritten.

Packs of a tier are merged, eight at a time, into one of the next tier, so a stream has few extents however many
checkpoints it went through, and each byte is rewritten once per tier. A large extent leaves the tiers for a `BIG` pack,
which is rewritten only when most of it is garbage. At most `open_max` packs are open for reading at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from headwater.storage.extents import EXTENT
from headwater.storage.filesystem import Filesystem
from headwater.storage.packs.pack import Pack, PackInfo

BIG: Final = 255
"""The tier of packs for large extents."""
TIER_MAX: Final = 8
FANOUT: Final = 8
OPEN_MAX: Final = 128


class Rewrite(NamedTuple):
    """Packs whose living contents should move to fresh packs of `tier` (and large extents to a `BIG` one)."""

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
        self._settling: set[int] = set()
        self._spared: set[int] = set()

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
        """A pack that can be read from now on. Until `complete`, not all that live in it have been counted."""
        self._infos[info.number] = info
        self._live[info.number] = 0
        self._settling.add(info.number)

    def complete(self, infos: Iterable[PackInfo]) -> None:
        """All that live in these packs have been counted: what is not counted is garbage."""
        self._settling.difference_update(info.number for info in infos)

    def remove(self, number: int) -> None:
        """Forget a pack that nothing refers to any more."""
        del self._infos[number], self._live[number]
        self._spared.discard(number)
        self.shut((number,))

    def hold(self, blob: bytes) -> None:
        """Count extents as living."""
        for pack, _, _, _, _, length in EXTENT.iter_unpack(blob):
            self._live[pack] += length

    def release(self, blob: bytes) -> None:
        for pack, _, _, _, _, length in EXTENT.iter_unpack(blob):
            self._live[pack] -= length

    def spare(self, numbers: Iterable[int]) -> None:
        """Do not rewrite these: something in them is damaged, and a copy would look sound."""
        self._spared.update(numbers)

    def pack(self, number: int) -> Pack:
        """A pack, open; one that was not used for longest is closed to make room."""
        pack = self._open.get(number)
        if pack is None:
            pack = Pack(self._filesystem, self._directory, self._infos[number])
            self._open[number] = pack
            if len(self._open) > self._open_max:
                _, eldest = self._open.popitem(last=False)
                eldest.close()
        else:
            self._open.move_to_end(number)
        return pack

    @property
    def recent(self) -> list[int]:
        """The packs that are open, the one that was used last at the end."""
        return list(self._open)

    def shut(self, numbers: Iterable[int]) -> None:
        """Close packs that are open. They are opened again when they are read."""
        for number in numbers:
            pack = self._open.pop(number, None)
            if pack is not None:
                pack.close()

    def dead(self) -> tuple[int, ...]:
        """The packs of which nothing counts any more, damaged ones too: they can be removed unread."""
        return tuple(number for number, live in self._live.items() if not live and number not in self._settling)

    def next_rewrite(self) -> Rewrite | None:
        """What is most worth rewriting now, if anything."""
        tiers: dict[int, list[PackInfo]] = {}
        for info in self._infos.values():
            live = self._live[info.number]
            if not live or info.number in self._spared or info.number in self._settling:
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
