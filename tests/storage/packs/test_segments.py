"""Log segments: the next one is created in advance, so a full segment or a lack of descriptors stops no write."""

from __future__ import annotations

import errno
from random import Random

import pytest

from headwater.storage.interface import WriteFailedError
from tests.storage.faulty_filesystem import FaultyFilesystem
from tests.storage.simulation import Life

BODY = b"x" * 700
APPENDS_PER_SEGMENT = 6


def started() -> Life:
    life = Life(FaultyFilesystem(Random(1)), Random(2))
    life.create("a")
    life.commit()
    return life


def append(life: Life, times: int = 1) -> None:
    for _ in range(times):
        life.append("a", BODY)
        life.commit()


def segment_sizes(life: Life) -> list[int]:
    return [len(data) for name, data in life.filesystem.snapshot().items() if name.endswith(".log")]


def test_rolling_a_segment_needs_no_descriptor() -> None:
    life = started()
    life.filesystem.exhausted = True
    append(life, APPENDS_PER_SEGMENT + 2)
    first, second = segment_sizes(life)
    assert first > 4096
    assert second > len(BODY), "the log continues in the second segment"


def test_without_descriptors_a_full_segment_grows_and_no_write_fails() -> None:
    life = started()
    life.filesystem.exhausted = True
    append(life, 5 * APPENDS_PER_SEGMENT)
    assert len(segment_sizes(life)) == 2
    life.filesystem.exhausted = False
    life.clock.now_s += 10.0
    append(life, 2)
    assert len(segment_sizes(life)) > 2
    life.filesystem.crash(power=True)
    again = Life(life.filesystem, Random(3))
    stream_id = again.catalog.by_name["a"].id
    size = (5 * APPENDS_PER_SEGMENT + 2) * len(BODY)
    assert b"".join(again.storage.read(stream_id, 0, size)) == b"x" * size


def test_an_io_error_while_the_next_segment_is_created_stops_writes() -> None:
    """The name may or may not survive a power cut then, so nothing may rely on it."""
    life = started()
    append(life, APPENDS_PER_SEGMENT)
    life.filesystem.fails_on["sync_directory", "log"] = errno.EIO
    append(life)
    life.maintain()
    with pytest.raises(WriteFailedError):
        append(life)


def test_a_torn_write_is_cut_though_the_next_segment_exists() -> None:
    life = started()
    append(life, 2)
    assert len(segment_sizes(life)) == 2
    disk = life.filesystem.snapshot()
    current = min(name for name in disk if name.endswith(".log"))
    life.filesystem.restore(disk | {current: disk[current][:-100]})
    again = Life(life.filesystem, Random(3))
    assert again.catalog.by_name["a"].byte_position == len(BODY)
