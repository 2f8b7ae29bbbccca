"""Reading a journal from a record on: earlier batches are skipped by their headers, later ones are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.core.records import Append
from headwater.storage.filesystem import MappedFile, RealFilesystem
from headwater.storage.interface import Committed, CorruptError
from headwater.storage.journal.frames import FRAME
from headwater.storage.journal.replay import SKIP_BYTES, JournalReader
from headwater.storage.journal.segments import FileJournal, segment_path

BODY_BYTES = 300_000
BATCHES = 12
RECORDS = 2
"""Records of each batch."""


class CountingFilesystem(RealFilesystem):
    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def map(self, path: Path) -> MappedFile:
        mapped = super().map(path)
        read = mapped.read

        class Counting:
            view = mapped.view
            will_need = mapped.will_need
            relax = mapped.relax
            close = mapped.close

            def read(_, offset: int, length: int) -> bytes:
                self.read_bytes += length
                return read(offset, length)

        return Counting()


def written(directory: Path) -> list[int]:
    """Write a journal in two segments; return the offsets of the batches of the first one."""
    filesystem = RealFilesystem()
    offsets: list[int] = []
    journal = FileJournal(
        filesystem, directory, number=1, last_lsn=0, previous_lsn=0, segment_bytes=6 * BODY_BYTES, durable=False
    )
    for number in range(BATCHES):
        if len(journal.segments) == 1:
            offsets.append(journal.size_bytes)
        append = Append(7, 1, number, number * BODY_BYTES, b"x" * BODY_BYTES, (BODY_BYTES,))
        journal.append([Committed(append)] * RECORDS)
        journal.prepare()
        if number == 4:
            journal.mark_complete()
    journal.close()
    assert len(journal.segments) > 1
    return offsets


@pytest.mark.parametrize("after", [-1, 0, 1, 2, 3, 8, 10, 11, 21, 22])
def test_batches_with_later_records_are_returned_and_earlier_ones_are_not_read(tmp_path: Path, after: int) -> None:
    written(tmp_path)
    filesystem = CountingFilesystem()
    frames = list(JournalReader(filesystem, tmp_path, 1).batches(BATCHES * RECORDS, after))
    numbers = [frame.number for frame in frames if frame.entries]
    assert numbers == [n for n in range(1, BATCHES * RECORDS, RECORDS) if n + RECORDS - 1 > after]
    needed = len(numbers) * RECORDS * BODY_BYTES
    assert needed <= filesystem.read_bytes <= 2.5 * needed + (BATCHES + 3) * SKIP_BYTES


def test_damage_in_the_header_of_a_skipped_batch_is_an_error(tmp_path: Path) -> None:
    offsets = written(tmp_path)
    path = segment_path(tmp_path, 1)
    whole = path.read_bytes()
    for at in (offsets[2], offsets[2] + FRAME.size - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptError):
            list(JournalReader(RealFilesystem(), tmp_path, 1).batches(BATCHES * RECORDS, 8))


def test_damage_in_a_batch_that_is_returned_is_an_error(tmp_path: Path) -> None:
    offsets = written(tmp_path)
    path = segment_path(tmp_path, 1)
    whole = bytearray(path.read_bytes())
    whole[offsets[-1] - BODY_BYTES // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CorruptError):
        list(JournalReader(RealFilesystem(), tmp_path, 1).batches(BATCHES * RECORDS, 2))


def test_all_batches_can_be_skipped(tmp_path: Path) -> None:
    written(tmp_path)
    last = BATCHES * RECORDS
    assert list(JournalReader(RealFilesystem(), tmp_path, 1).batches(last, last)) == []
