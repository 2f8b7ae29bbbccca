"""Journal segments: the next one is prepared in advance, so a full segment or a lack of descriptors stops no write.

The next segment is a recycled one or, if the journal is synced, filled with zeros; recovery ignores its old content.
"""

from __future__ import annotations

import errno
from random import Random

import pytest

from headwater.storage.interface import CorruptError, WriteFailedError
from headwater.storage.journal.segments import HEADER_BYTES, unpack_header
from tests.storage.faulty_filesystem import FaultyFilesystem
from tests.storage.simulation import SimulatedProcess

BODY = b"x" * 700
APPENDS_PER_SEGMENT = 6


def started(*, durable: bool = True) -> SimulatedProcess:
    process = SimulatedProcess(FaultyFilesystem(Random(1)), Random(2), durable=durable)
    process.create("a")
    process.commit()
    return process


def append(process: SimulatedProcess, times: int = 1) -> None:
    for _ in range(times):
        process.append("a", BODY)
        process.commit()


def segment_sizes(process: SimulatedProcess) -> list[int]:
    return [len(data) for name, data in process.filesystem.snapshot().items() if name.endswith(".log")]


def test_rolling_a_segment_needs_no_descriptor() -> None:
    process = started()
    process.filesystem.exhausted = True
    append(process, APPENDS_PER_SEGMENT + 2)
    first, second = segment_sizes(process)
    assert first > 4096
    assert second > len(BODY), "the journal continues in the second segment"


def test_without_descriptors_a_full_segment_grows_and_no_write_fails() -> None:
    process = started()
    process.filesystem.exhausted = True
    append(process, 5 * APPENDS_PER_SEGMENT)
    assert len(segment_sizes(process)) == 2
    process.filesystem.exhausted = False
    process.clock.now_s += 10.0
    append(process, 2)
    assert len(segment_sizes(process)) > 2
    process.filesystem.crash(power=True)
    again = SimulatedProcess(process.filesystem, Random(3))
    stream_id = again.catalog.by_name["a"].id
    size = (5 * APPENDS_PER_SEGMENT + 2) * len(BODY)
    assert b"".join(again.storage.read(stream_id, 0, size)) == b"x" * size


def test_an_io_error_while_the_next_segment_is_created_stops_writes() -> None:
    """The name may or may not survive a power cut, so nothing may depend on it."""
    process = started()
    append(process, APPENDS_PER_SEGMENT)
    process.filesystem.fails_on["sync_directory", "log"] = errno.EIO
    with pytest.raises(WriteFailedError):
        append(process, 2 * APPENDS_PER_SEGMENT)


def test_a_torn_write_is_cut_though_the_next_segment_exists() -> None:
    process = started()
    append(process, 2)
    assert len(segment_sizes(process)) == 2
    disk = process.filesystem.snapshot()
    current = min(name for name in disk if name.endswith(".log"))
    process.filesystem.restore(disk | {current: disk[current][:-100]})
    again = SimulatedProcess(process.filesystem, Random(3))
    assert again.catalog.by_name["a"].byte_position == len(BODY)


def segments(process: SimulatedProcess) -> dict[str, bytes]:
    return {name: data for name, data in process.filesystem.snapshot().items() if name.endswith(".log")}


def content(process: SimulatedProcess) -> bytes:
    stream = process.catalog.by_name["a"]
    return b"".join(process.storage.read(stream.id, 0, stream.byte_position))


def checkpoint(process: SimulatedProcess) -> None:
    process.storage.checkpoint_soon()
    process.rest()


def recycled(*, durable: bool = True) -> SimulatedProcess:
    """Build a store whose next segment is a recycled one, with its old batches but without its header."""
    process = started(durable=durable)
    # Without syncs, the second segment was prepared as an empty file before there was one to recycle.
    for _ in range(3 if durable else 4):
        append(process, 2 * APPENDS_PER_SEGMENT)
        checkpoint(process)
    last = segments(process)[max(segments(process))]
    assert unpack_header(last) is None
    assert any(last)
    return process


def test_next_segment_is_filled_only_when_the_current_one_is_used() -> None:
    process = started()
    process.rest()
    assert segment_sizes(process)[1] == 0
    append(process, 2)
    assert segment_sizes(process)[1] == 4096


def test_journal_without_syncs_fills_nothing() -> None:
    process = SimulatedProcess(FaultyFilesystem(Random(1)), Random(2), durable=False)
    process.create("a")
    append(process, APPENDS_PER_SEGMENT)
    process.rest()
    assert segment_sizes(process)[-1] == 0


def syncs_of_an_append(process: SimulatedProcess) -> int:
    """How often a write waits for the disk."""
    process.append("a", BODY)
    before = len(process.filesystem.log)
    process.storage.write(process.queue)
    syncs = sum(" sync " in line for line in process.filesystem.log[before:])
    process.storage.publish(process.queue)
    process.queue.clear()
    return syncs


def test_write_that_waits_for_two_syncs_is_announced() -> None:
    """The engine writes it on a thread: on the event loop all clients would wait for both."""
    process = started()
    process.filesystem.traces = True
    announced = set()
    for _ in range(4 * APPENDS_PER_SEGMENT):
        takes_long = process.storage.takes_long()
        announced.add(takes_long)
        assert syncs_of_an_append(process) == (2 if takes_long else 1)
        process.rest()
    assert announced == {False, True}


def test_segment_that_becomes_ready_late_does_not_change_the_announced_syncs() -> None:
    process = started()
    process.filesystem.traces = True
    for _ in range(2):
        assert syncs_of_an_append(process) == 1
    assert not process.storage.takes_long()
    process.rest()
    assert segment_sizes(process)[1] == 4096
    assert syncs_of_an_append(process) == 1
    assert process.storage.takes_long()
    assert syncs_of_an_append(process) == 2


def test_full_disk_leaves_the_next_segment_empty_and_writes_continue() -> None:
    process = started()
    process.filesystem.fails_on["write", "0000002.log"] = errno.ENOSPC
    append(process, 3)
    assert segment_sizes(process)[1] == 0
    del process.filesystem.fails_on["write", "0000002.log"]
    append(process, 3 * APPENDS_PER_SEGMENT)
    assert content(process) == BODY * (3 * APPENDS_PER_SEGMENT + 3)


def test_io_error_while_the_next_segment_is_filled_stops_writes() -> None:
    process = started()
    process.filesystem.fails_on["sync", "0000002.log"] = errno.EIO
    with pytest.raises(WriteFailedError, match="Preparing the next journal segment"):
        append(process, APPENDS_PER_SEGMENT)


def test_recycled_segment_is_overwritten_and_its_old_batches_are_ignored() -> None:
    process = recycled()
    expected = content(process)
    for power in (False, True):
        process.filesystem.crash(power=power)
        process = SimulatedProcess(process.filesystem, Random(3))
        assert content(process) == expected
    process = recycled()
    append(process, 2 * APPENDS_PER_SEGMENT)
    expected = content(process)
    process.filesystem.crash(power=True)
    assert content(SimulatedProcess(process.filesystem, Random(3))) == expected


def test_segment_is_recycled_without_syncs_too_and_survives_the_death_of_the_process() -> None:
    for more in range(4):
        process = recycled(durable=False)
        append(process, more * APPENDS_PER_SEGMENT)
        expected = content(process)
        process.filesystem.crash(power=False)
        assert content(SimulatedProcess(process.filesystem, Random(3), durable=False)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_recycled_segment_without_syncs_leaves_a_beginning_of_the_stream_after_a_power_loss(seed: int) -> None:
    """Its old batches are complete and valid, but not of this journal."""
    process = recycled(durable=False)
    saved = len(content(process))
    for number in range(seed):
        process.append("a", b"%d" % number * 300)
        process.commit()
    expected = content(process)
    process.filesystem._random.seed(seed)
    process.filesystem.crash(power=True)
    found = content(SimulatedProcess(process.filesystem, Random(3), durable=False))
    assert expected.startswith(found)
    assert len(found) >= saved, "what a checkpoint saved is lost"


@pytest.mark.parametrize("garbage", [bytes(HEADER_BYTES), b"\xa5" * HEADER_BYTES])
def test_damaged_header_of_a_begun_segment_is_not_taken_for_an_unused_one(garbage: bytes) -> None:
    process = started()
    append(process, 3)
    disk = process.filesystem.snapshot()
    used = max(name for name, data in segments(process).items() if unpack_header(data) is not None)
    process.filesystem.restore(disk | {used: garbage + disk[used][HEADER_BYTES:]})
    with pytest.raises(CorruptError):
        SimulatedProcess(process.filesystem, Random(3))


def test_shutdown_leaves_no_prepared_space_behind() -> None:
    process = recycled()
    append(process, 2)
    expected = content(process)
    process.storage.close()
    left = segments(process)
    assert all(unpack_header(data) is not None for data in left.values())
    assert max(map(len, left.values())) < 2 * 4096 + len(BODY)
    process.filesystem.crash(power=False)
    assert content(SimulatedProcess(process.filesystem, Random(3))) == expected
