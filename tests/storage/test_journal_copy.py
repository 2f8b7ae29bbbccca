"""Copies of a journal that is being written: segments roll and are recycled between any two calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headwater.core.records import Append
from headwater.operating_system import SYSTEM
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import Committed
from headwater.storage.journal.frames import read_batch
from headwater.storage.journal.replay import Replay, copy_journal
from headwater.storage.journal.segments import FileJournal, segment_numbers
from headwater.storage.offline.backup import _copy_file

SEGMENT_BYTES = 2000


@pytest.fixture(autouse=True)
def _nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no power losses here, and syncs would take nearly all of the time."""
    for name in ("sync_data", "sync_file"):
        monkeypatch.setattr(type(SYSTEM), name, lambda *_: None)


class Writer:
    """A journal with batches of one record, which contains its number."""

    def __init__(self, directory: Path) -> None:
        self.filesystem = RealFilesystem()
        self.directory = directory
        directory.mkdir()
        self.journal = FileJournal(
            self.filesystem,
            directory,
            number=1,
            last_lsn=0,
            previous_lsn=0,
            segment_bytes=SEGMENT_BYTES,
            durable=True,
        )

    def write(self) -> None:
        number = self.journal.last_lsn
        self.journal.append([Committed(Append(1, 1, number, 300 * number, b"%0300d" % number, (300,)))])
        if self.journal.wants_next:
            self.journal.prepare()
        elif self.journal.wants_fill:
            for _ in self.journal.fill():
                pass

    def roll(self, times: int) -> None:
        wanted = self.journal.segments[-1].number + times
        while self.journal.segments[-1].number < wanted:
            self.write()


class Busy(RealFilesystem):
    """A file system that runs another action between any two calls of the copy."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def read(self, path: Path) -> bytes:
        self._happens()
        return super().read(path)

    def names(self, path: Path) -> list[str]:
        self._happens()
        return super().names(path)


def records_of(copy: Path, first_number: int) -> list[int]:
    replay = Replay(RealFilesystem(), copy, first_number, lambda _: None)
    return [
        each.record.message_index
        for frame in replay.batches()
        for each in read_batch(frame)
        if isinstance(each.record, Append)
    ]


def test_segments_created_while_the_directory_is_listed_leave_no_gap(tmp_path: Path) -> None:
    """The listing may have a later one and lack an earlier one."""
    writer = Writer(tmp_path / "log")
    writer.roll(2)
    acknowledged = writer.journal.last_lsn

    class Listing(RealFilesystem):
        def names(self, path: Path) -> list[str]:
            before = super().names(path)
            if path != writer.directory:
                return before
            writer.roll(4)
            begun = f"{writer.journal.segments[-1].number:016d}.log"
            assert begun not in before
            return [*before, begun]

    (tmp_path / "copy").mkdir()
    copy_journal(Listing(), writer.directory, tmp_path / "copy", 1, _copy_file)
    found = records_of(tmp_path / "copy", 1)
    assert found == list(range(len(found)))
    assert len(found) >= acknowledged
    writer.journal.close()


@pytest.mark.parametrize("seed", range(2))
def test_copy_is_consistent_while_segments_roll_and_are_recycled(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    writer = Writer(tmp_path / "log")
    writer.roll(3)

    def happens() -> None:
        for _ in range(random.randrange(12)):
            writer.write()
        if random.random() < 0.1:
            writer.journal.trim(writer.journal.segments[-1].number - random.randrange(3))

    def copy_file(source: Path, target: Path) -> Any:
        happens()
        return _copy_file(source, target)

    copies = spares = 0
    for number in range(40):
        writer.roll(random.randrange(3))
        acknowledged = writer.journal.last_lsn
        first = writer.journal.segments[0]
        copy = tmp_path / f"copy-{number}"
        copy.mkdir()
        try:
            copy_journal(Busy(happens), writer.directory, copy, first.number, copy_file)
        except FileNotFoundError:
            assert first.number not in segment_numbers(RealFilesystem(), writer.directory), "it was trimmed"
            continue
        found = records_of(copy, first.number)
        assert found == list(range(first.first_lsn - 1, first.first_lsn - 1 + len(found)))
        assert first.first_lsn - 1 + len(found) >= acknowledged
        copies += 1
        spares += any(path.name.startswith("spare-") for path in writer.directory.iterdir())
    writer.journal.close()
    assert copies >= 5
    assert spares, "segments were recycled"
