"""Ways in which other stream servers have lost or invented data, T-1 to T-10, each tested on this store."""

from __future__ import annotations

import errno
from random import Random

import pytest

from headwater.core.errors import SequenceGap
from headwater.core.producers import ProducerHeaders
from headwater.core.records import Append
from headwater.core.rules import AppendOutcome, decide_append
from headwater.storage.interface import CorruptError, StorageError, WriteFailedError
from headwater.storage.journal.frames import FRAME
from headwater.storage.journaled_store import StoreSettings
from tests.storage.faulty_filesystem import Crashed, FaultyFilesystem
from tests.storage.model import difference, model_of
from tests.storage.packs.test_checkpoints import Bench
from tests.storage.simulation import DATA, TINY, SimulatedProcess

LOG = "/data/log/0000000000000001.log"


def fresh(settings: StoreSettings = TINY, seed: int = 1) -> SimulatedProcess:
    return SimulatedProcess(FaultyFilesystem(Random(seed)), Random(seed), settings=settings)


def restarted(process: SimulatedProcess, *, power: bool = True, settings: StoreSettings = TINY) -> SimulatedProcess:
    """Start a new process on the same disk."""
    process.filesystem.crash(power=power)
    process.abandon()
    process = SimulatedProcess(process.filesystem, Random(9), settings=settings)
    process.begin_from(model_of(process.catalog, process.storage))
    return process


def messages_of(process: SimulatedProcess, name: str) -> list[bytes]:
    return model_of(process.catalog, process.storage).streams[process.catalog.by_name[name].id].messages


@pytest.mark.parametrize("power", [True, False], ids=["power loss", "kill"])
def test_t1_a_retry_after_a_crash_in_any_call_makes_exactly_one_copy(power: bool) -> None:
    """Data and producer state are one record: after any crash the same seq is new or a duplicate, never a gap."""
    for number in range(1, 60):
        process = fresh(seed=number)
        process.create("orders")
        process.append("orders", b"first", producer=ProducerHeaders("p", 0, 0))
        process.commit()
        process.append("orders", b"second", producer=ProducerHeaders("p", 0, 1))
        process.filesystem.crash_at = process.filesystem.calls + number
        died = False
        try:
            process.commit()
            process.rest()
            process.storage.close()
        except (Crashed, StorageError):
            died = True
        process = restarted(process, power=power)
        stream = process.catalog.by_name["orders"]
        retry = ProducerHeaders("p", 0, 1)
        try:
            decision = decide_append(stream, "text/plain", b"second", retry, None, False, process.now_ms)
        except SequenceGap as gap:
            raise AssertionError(f"a false gap after a crash in call {number}") from gap
        if isinstance(decision, Append):
            process.append("orders", b"second", producer=retry)
            process.commit()
        else:
            assert decision is AppendOutcome.DUPLICATE
        assert messages_of(process, "orders") == [b"first", b"second"]
        if not died:
            break
    else:
        pytest.fail("the scenario has more calls than were tested")


def test_t2_boot_neither_re_creates_nor_fills_existing_segments() -> None:
    process = fresh()
    process.create("a")
    for number in range(10):
        process.append("a", b"%04d" % number * 100)
        process.commit()
    segments = {name: data for name, data in process.filesystem.snapshot().items() if name.endswith(".log")}
    before = {name: data for name, data in segments.items() if any(data)}
    assert len(segments) - len(before) == 1, "the next one exists, and contains only zeros"
    assert len(before) >= 1
    for _ in range(4):
        process = restarted(process)
        after = {name: data for name, data in process.filesystem.snapshot().items() if name.endswith(".log")}
        assert all(data.startswith(after[name]) for name, data in before.items() if name in after)
        assert all(not any(data[len(after[name]) :]) for name, data in before.items() if name in after)
        assert max(after) > max(before)
        assert messages_of(process, "a") == [b"%04d" % number * 100 for number in range(10)]
        before = after


def test_t3_torn_write_to_an_idle_stream_is_not_readable() -> None:
    """No later record confirms it: only the checksum shows that it is torn."""
    for seed in range(200):
        process = fresh(seed=seed)
        process.create("quiet")
        process.append("quiet", b"whole")
        process.commit()
        process.append("quiet", Random(seed).randbytes(3000))
        process.filesystem.crash_in_sync = (".log", 0)
        with pytest.raises(WriteFailedError):
            process.commit()
        expected = [model.dump() for model in process.outcomes()]
        process = restarted(process)
        assert model_of(process.catalog, process.storage).dump() in expected, f"seed {seed}"


def test_t4_acknowledged_delete_is_permanent() -> None:
    """This holds through any number of crashes, checkpoints and re-creations of the name."""
    bench = Bench()
    process = bench.process
    for round_ in range(4):
        first = process.create("name", b"old" * 100)
        process.commit()
        bench.save()
        process.delete("name")
        process.commit()
        process = bench.restart()
        assert "name" not in process.catalog.by_name
        second = process.create("name", b"new")
        process.commit()
        process = bench.restart()
        assert process.catalog.by_name["name"].id == second != first
        if round_ % 2:
            bench.save()
        process.delete("name")
        process.commit()
        bench.save()
        process = bench.restart()
        assert not process.catalog.by_id


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("call", ["write", "sync"])
def test_t5_failed_write_or_sync_is_never_retried(call: str, code: int) -> None:
    """On Linux the second sync reports success for pages that the first one lost."""
    process = fresh(StoreSettings(reserve_bytes=0))
    process.create("a", b"kept")
    process.commit()
    process.append("a", b"lost?")
    process.filesystem.faults[process.filesystem.calls + (1 if call == "write" else 2)] = code
    with pytest.raises(WriteFailedError, match=r"log.*failed"):
        process.commit()
    for _ in range(3):
        process.queue.clear()
        process.append("a", b"later")
        with pytest.raises(WriteFailedError, match=r"log.*failed"):
            process.commit()
    refusal = process.storage.refusal()
    assert refusal is not None
    assert "failed" in refusal
    # Durable data can still be read.
    assert b"".join(process.storage.read(process.catalog.by_name["a"].id, 0, 4)) == b"kept"
    expected = [model.dump() for model in process.outcomes()]
    process = restarted(process, settings=StoreSettings(reserve_bytes=0))
    assert model_of(process.catalog, process.storage).dump() in expected


def test_t6_write_truncated_by_a_full_disk_does_not_shift_positions() -> None:
    """Neither the positions of later messages nor the detection of duplicates change."""
    for seed in range(30):
        process = fresh(StoreSettings(reserve_bytes=0), seed=seed)
        process.create("a")
        process.append("a", b"one", producer=ProducerHeaders("p", 0, 0))
        process.commit()
        process.append("a", b"two" * 300, producer=ProducerHeaders("p", 0, 1))
        process.filesystem.full_from = process.filesystem.calls + 1
        with pytest.raises(WriteFailedError):
            process.commit()
        process = restarted(process, power=bool(seed % 2), settings=StoreSettings(reserve_bytes=0))
        stream = process.catalog.by_name["a"]
        assert (stream.message_index, stream.byte_position) == (1, 3)
        process.append("a", b"two" * 300, producer=ProducerHeaders("p", 0, 1))
        process.commit()
        assert messages_of(process, "a") == [b"one", b"two" * 300]


def test_t7_a_corrupt_length_at_the_tail_costs_only_the_tail() -> None:
    process = fresh(StoreSettings(reserve_bytes=0))
    process.create("a", b"good")
    process.commit()
    disk = process.filesystem.snapshot()
    good = len(disk[LOG])
    process.append("a", b"bad")
    process.commit()
    disk = process.filesystem.snapshot()
    damaged = bytearray(disk[LOG])
    # The length of the last frame, which is not yet marked as complete.
    damaged[good + 12 : good + 16] = b"\xff\xff\xff\x7f"
    process.filesystem.restore({**disk, LOG: bytes(damaged)})
    process = SimulatedProcess(process.filesystem, Random(1), settings=StoreSettings(reserve_bytes=0))
    assert messages_of(process, "a") == [b"good"]


def test_t7_flipped_bit_in_the_journal_is_reported_and_not_served() -> None:
    process = fresh(StoreSettings(reserve_bytes=0))
    process.create("invoices", b"first")
    process.commit()
    start = len(process.filesystem.snapshot()[LOG])
    process.append("invoices", b"secret of the second message")
    process.commit()
    process.append("invoices", b"third")
    process.commit()
    disk = process.filesystem.snapshot()
    damaged = bytearray(disk[LOG])
    damaged[damaged.index(b"secret")] ^= 1
    process.filesystem.restore({**disk, LOG: bytes(damaged)})
    with pytest.raises(CorruptError, match=rf"0001\.log is damaged at byte {start}: record 2 .*stream 'invoices'"):
        SimulatedProcess(process.filesystem, Random(1), settings=StoreSettings(reserve_bytes=0))


def test_t7_flipped_bit_in_a_pack_is_reported_and_affects_no_other_stream() -> None:
    bench = Bench()
    process = bench.process
    ids = {name: process.create(name, name.encode() * 20_000) for name in ("ant", "bee", "cat")}
    process.commit()
    bench.save()
    disk = bench.filesystem.snapshot()
    pack = next(name for name in disk if name.endswith(".pack"))
    damaged = bytearray(disk[pack])
    # Inside one of them, whichever is first in the file.
    damaged[20_000] ^= 0x10
    bench.filesystem.restore({**disk, pack: bytes(damaged)})
    process = SimulatedProcess(bench.filesystem, Random(1), settings=bench.settings)
    outcomes = {}
    for name, stream_id in ids.items():
        try:
            outcomes[name] = b"".join(process.storage.read(stream_id, 0, 60_000))
        except CorruptError as error:
            outcomes[name] = str(error).encode()
    wrong = [name for name in ids if outcomes[name] != name.encode() * 20_000]
    assert len(wrong) == 1
    report = outcomes[wrong[0]].decode()
    assert f"stream '{wrong[0]}'" in report
    assert "is damaged at position 16" in report
    assert pack in report


def test_t7_frames_planted_in_a_payload_do_not_pass_for_frames() -> None:
    """A client that knows the format cannot make a torn tail look like damage in the middle."""
    process = fresh(StoreSettings(reserve_bytes=0))
    process.create("a")
    process.commit()
    planted = bytearray(FRAME.size)
    planted += process.filesystem.snapshot()[LOG][64:] * 3
    process.append("a", bytes(planted))
    process.filesystem.crash_in_sync = (".log", 0)
    with pytest.raises(WriteFailedError):
        process.commit()
    process = restarted(process)
    assert messages_of(process, "a") in ([], [bytes(planted)])


def test_t8_repeatedly_interrupted_recovery_has_the_same_result() -> None:
    """Recovery that crashes at a later call each time has the same result."""
    process = fresh()
    process.create("a")
    for number in range(30):
        process.append("a", b"%04d" % number * 60)
        process.commit()
        process.worker.step()
    process.append("a", b"torn" * 300)
    process.filesystem.crash_in_sync = (".log", 0)
    with pytest.raises(WriteFailedError):
        process.commit()
    expected = [model.dump() for model in process.outcomes()]
    filesystem = process.filesystem
    filesystem.crash(power=True)
    process.abandon()
    for call in range(1, 60):
        filesystem.crash_at = filesystem.calls + call
        try:
            process = SimulatedProcess(filesystem, Random(call))
        except (Crashed, StorageError):
            filesystem.crash(power=bool(call % 3))
            continue
        found = model_of(process.catalog, process.storage).dump()
        assert found in expected, difference(expected[0], found)
        expected = [found]
        filesystem.crash(power=bool(call % 2))
    assert len(expected) == 1


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES], ids=lambda code: errno.errorcode[code])
def test_t9_unreadable_data_fails_the_start(code: int) -> None:
    bench = Bench()
    process = bench.process
    process.create("a", b"1" * 100)
    process.create("b", b"2" * 100)
    process.commit()
    bench.save()
    process.append("a", b"3")
    process.commit()
    disk = bench.filesystem.snapshot()
    bench.filesystem.restore(disk)
    bench.filesystem.calls = 0
    SimulatedProcess(bench.filesystem, Random(1), settings=bench.settings)
    for number in range(1, bench.filesystem.calls + 1):
        bench.filesystem.restore(disk)
        bench.filesystem.calls = 0
        bench.filesystem.faults[number] = code
        with pytest.raises(StorageError, match=str(DATA)):
            SimulatedProcess(bench.filesystem, Random(1), settings=bench.settings)


def test_t10_removal_resets_every_counter() -> None:
    bench = Bench()
    process = bench.process
    for round_ in range(5):
        for number in range(20):
            process.create(f"s{number}", Random(number).randbytes(500), ttl=1)
        process.commit()
        if round_ % 2:
            bench.save()
        for number in range(20):
            process.append(f"s{number}", b"more")
        process.commit()
        for number in range(20):
            process.delete(f"s{number}")
        process.commit()
        assert process.storage.usage() == (0, 0)
    bench.save()
    process.rest()
    bench.save()
    unsaved, parts = process.storage._unsaved, process.storage.parts()
    assert not unsaved.streams
    assert process.storage.usage() == (0, 0)
    assert (parts["packs"], parts["live_bytes"], parts["dead_bytes"]) == (0, 0, 0)
    assert not any((unsaved.dirty, unsaved.removed, unsaved.being_forgotten, unsaved.removed_ids, unsaved.documents))
