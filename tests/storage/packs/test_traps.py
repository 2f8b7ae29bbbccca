"""The ways in which other servers of this kind have lost or invented data, T-1 to T-10, each tried on this store."""

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
from tests.storage.simulation import DATA, TINY, Life

LOG = "/data/log/0000000000000001.log"


def fresh(settings: StoreSettings = TINY, seed: int = 1) -> Life:
    return Life(FaultyFilesystem(Random(seed)), Random(seed), settings=settings)


def reborn(life: Life, *, power: bool = True, settings: StoreSettings = TINY) -> Life:
    """The next life on the same disk, whatever it finds."""
    life.filesystem.crash(power=power)
    life.abandon()
    life = Life(life.filesystem, Random(9), settings=settings)
    life.begin_from(model_of(life.catalog, life.storage))
    return life


def messages_of(life: Life, name: str) -> list[bytes]:
    return model_of(life.catalog, life.storage).streams[life.catalog.by_name[name].id].messages


@pytest.mark.parametrize("power", [True, False], ids=["power loss", "kill"])
def test_t1_a_retry_after_a_crash_in_any_call_makes_exactly_one_copy(power: bool) -> None:
    """Data and producer state are one record: after any crash the same seq is new or a repeat, never a gap."""
    for number in range(1, 60):
        life = fresh(seed=number)
        life.create("orders")
        life.append("orders", b"first", producer=ProducerHeaders("p", 0, 0))
        life.commit()
        life.append("orders", b"second", producer=ProducerHeaders("p", 0, 1))
        life.filesystem.crash_at = life.filesystem.calls + number
        died = False
        try:
            life.commit()
            life.rest()
            life.storage.close()
        except (Crashed, StorageError):
            died = True
        life = reborn(life, power=power)
        stream = life.catalog.by_name["orders"]
        retry = ProducerHeaders("p", 0, 1)
        try:
            decision = decide_append(stream, "text/plain", b"second", retry, None, False, life.now_ms)
        except SequenceGap as gap:
            raise AssertionError(f"a false gap after a crash in call {number}") from gap
        if isinstance(decision, Append):
            life.append("orders", b"second", producer=retry)
            life.commit()
        else:
            assert decision is AppendOutcome.DUPLICATE
        assert messages_of(life, "orders") == [b"first", b"second"]
        if not died:
            break
    else:
        pytest.fail("the scenario has more calls than were tried")


def test_t2_boot_neither_re_creates_nor_fills_existing_segments() -> None:
    life = fresh()
    life.create("a")
    for number in range(10):
        life.append("a", b"%04d" % number * 100)
        life.commit()
    segments = {name: data for name, data in life.filesystem.snapshot().items() if name.endswith(".log")}
    before = {name: data for name, data in segments.items() if data}
    assert len(segments) - len(before) == 1, "the next one is there, and empty"
    assert len(before) >= 1
    for _ in range(4):
        life = reborn(life)
        after = {name: data for name, data in life.filesystem.snapshot().items() if name.endswith(".log")}
        assert all(after[name] == data for name, data in before.items() if name in after)
        assert max(after) > max(before)
        assert messages_of(life, "a") == [b"%04d" % number * 100 for number in range(10)]
        before = after


def test_t3_a_torn_write_to_a_quiet_stream_leaves_nothing_to_read() -> None:
    """Nothing else in the log speaks for or against it: its checksum alone must tell."""
    for seed in range(200):
        life = fresh(seed=seed)
        life.create("quiet")
        life.append("quiet", b"whole")
        life.commit()
        life.append("quiet", Random(seed).randbytes(3000))
        life.filesystem.crash_in_sync = (".log", 0)
        with pytest.raises(WriteFailedError):
            life.commit()
        expected = [model.dump() for model in life.outcomes()]
        life = reborn(life)
        assert model_of(life.catalog, life.storage).dump() in expected, f"seed {seed}"


def test_t4_an_acknowledged_delete_stays_a_delete() -> None:
    """However many crashes, checkpoints and re-creations of the name follow."""
    bench = Bench()
    life = bench.life
    for round_ in range(4):
        first = life.create("name", b"old" * 100)
        life.commit()
        bench.save()
        life.delete("name")
        life.commit()
        life = bench.restart()
        assert "name" not in life.catalog.by_name
        second = life.create("name", b"new")
        life.commit()
        life = bench.restart()
        assert life.catalog.by_name["name"].id == second != first
        if round_ % 2:
            bench.save()
        life.delete("name")
        life.commit()
        bench.save()
        life = bench.restart()
        assert not life.catalog.by_id


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("call", ["write", "sync"])
def test_t5_a_failed_write_or_sync_is_never_tried_again(call: str, code: int) -> None:
    """On Linux the second sync reports success for pages that the first one lost."""
    life = fresh(StoreSettings(reserve_bytes=0))
    life.create("a", b"kept")
    life.commit()
    life.append("a", b"lost?")
    life.filesystem.faults[life.filesystem.calls + (1 if call == "write" else 2)] = code
    with pytest.raises(WriteFailedError, match=r"log.*failed"):
        life.commit()
    for _ in range(3):
        life.queue.clear()
        life.append("a", b"later")
        with pytest.raises(WriteFailedError, match=r"log.*failed"):
            life.commit()
    refusal = life.storage.refusal()
    assert refusal is not None
    assert "failed" in refusal
    # What was durable can still be read.
    assert b"".join(life.storage.read(life.catalog.by_name["a"].id, 0, 4)) == b"kept"
    expected = [model.dump() for model in life.outcomes()]
    life = reborn(life, settings=StoreSettings(reserve_bytes=0))
    assert model_of(life.catalog, life.storage).dump() in expected


def test_t6_a_write_cut_off_by_a_full_disk_shifts_nothing() -> None:
    """Neither the position of what comes later, nor whether a retry counts as a repeat."""
    for seed in range(30):
        life = fresh(StoreSettings(reserve_bytes=0), seed=seed)
        life.create("a")
        life.append("a", b"one", producer=ProducerHeaders("p", 0, 0))
        life.commit()
        life.append("a", b"two" * 300, producer=ProducerHeaders("p", 0, 1))
        life.filesystem.full_from = life.filesystem.calls + 1
        with pytest.raises(WriteFailedError):
            life.commit()
        life = reborn(life, power=bool(seed % 2), settings=StoreSettings(reserve_bytes=0))
        stream = life.catalog.by_name["a"]
        assert (stream.message_index, stream.byte_position) == (1, 3)
        life.append("a", b"two" * 300, producer=ProducerHeaders("p", 0, 1))
        life.commit()
        assert messages_of(life, "a") == [b"one", b"two" * 300]


def test_t7_a_corrupt_length_at_the_tail_costs_only_the_tail() -> None:
    life = fresh(StoreSettings(reserve_bytes=0))
    life.create("a", b"good")
    life.commit()
    disk = life.filesystem.snapshot()
    good = len(disk[LOG])
    life.append("a", b"bad")
    life.commit()
    disk = life.filesystem.snapshot()
    damaged = bytearray(disk[LOG])
    # The length of the last frame, before it was ever marked as whole.
    damaged[good + 12 : good + 16] = b"\xff\xff\xff\x7f"
    life.filesystem.restore({**disk, LOG: bytes(damaged)})
    life = Life(life.filesystem, Random(1), settings=StoreSettings(reserve_bytes=0))
    assert messages_of(life, "a") == [b"good"]


def test_t7_a_flipped_bit_in_the_log_is_named_and_not_served() -> None:
    life = fresh(StoreSettings(reserve_bytes=0))
    life.create("invoices", b"first")
    life.commit()
    start = len(life.filesystem.snapshot()[LOG])
    life.append("invoices", b"secret of the second message")
    life.commit()
    life.append("invoices", b"third")
    life.commit()
    disk = life.filesystem.snapshot()
    damaged = bytearray(disk[LOG])
    damaged[damaged.index(b"secret")] ^= 1
    life.filesystem.restore({**disk, LOG: bytes(damaged)})
    with pytest.raises(CorruptError, match=rf"0001\.log is damaged at byte {start}: record 2 .*stream 'invoices'"):
        Life(life.filesystem, Random(1), settings=StoreSettings(reserve_bytes=0))


def test_t7_a_flipped_bit_in_a_pack_is_named_and_harms_no_other_stream() -> None:
    bench = Bench()
    life = bench.life
    ids = {name: life.create(name, name.encode() * 20_000) for name in ("ant", "bee", "cat")}
    life.commit()
    bench.save()
    disk = bench.filesystem.snapshot()
    pack = next(name for name in disk if name.endswith(".pack"))
    damaged = bytearray(disk[pack])
    # Well inside one of them, whichever comes first in the file.
    damaged[20_000] ^= 0x10
    bench.filesystem.restore({**disk, pack: bytes(damaged)})
    life = Life(bench.filesystem, Random(1), settings=bench.settings)
    outcomes = {}
    for name, stream_id in ids.items():
        try:
            outcomes[name] = b"".join(life.storage.read(stream_id, 0, 60_000))
        except CorruptError as error:
            outcomes[name] = str(error).encode()
    wrong = [name for name in ids if outcomes[name] != name.encode() * 20_000]
    assert len(wrong) == 1
    told = outcomes[wrong[0]].decode()
    assert f"stream '{wrong[0]}'" in told
    assert "is damaged at position 16" in told
    assert pack in told


def test_t7_frames_planted_in_a_payload_do_not_pass_for_frames() -> None:
    """A client that knows the format cannot make a torn tail look like damage in the middle."""
    life = fresh(StoreSettings(reserve_bytes=0))
    life.create("a")
    life.commit()
    planted = bytearray(FRAME.size)
    planted += life.filesystem.snapshot()[LOG][64:] * 3
    life.append("a", bytes(planted))
    life.filesystem.crash_in_sync = (".log", 0)
    with pytest.raises(WriteFailedError):
        life.commit()
    life = reborn(life)
    assert messages_of(life, "a") in ([], [bytes(planted)])


def test_t8_recovery_of_a_recovery_of_a_recovery() -> None:
    """The same directory, crashed again and again at a later call of its recovery, comes to the same."""
    life = fresh()
    life.create("a")
    for number in range(30):
        life.append("a", b"%04d" % number * 60)
        life.commit()
        life.worker.step()
    life.append("a", b"torn" * 300)
    life.filesystem.crash_in_sync = (".log", 0)
    with pytest.raises(WriteFailedError):
        life.commit()
    expected = [model.dump() for model in life.outcomes()]
    filesystem = life.filesystem
    filesystem.crash(power=True)
    life.abandon()
    for call in range(1, 60):
        filesystem.crash_at = filesystem.calls + call
        try:
            life = Life(filesystem, Random(call))
        except (Crashed, StorageError):
            filesystem.crash(power=bool(call % 3))
            continue
        found = model_of(life.catalog, life.storage).dump()
        assert found in expected, difference(expected[0], found)
        expected = [found]
        filesystem.crash(power=bool(call % 2))
    assert len(expected) == 1


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES], ids=lambda code: errno.errorcode[code])
def test_t9_what_cannot_be_read_at_boot_fails_the_boot(code: int) -> None:
    bench = Bench()
    life = bench.life
    life.create("a", b"1" * 100)
    life.create("b", b"2" * 100)
    life.commit()
    bench.save()
    life.append("a", b"3")
    life.commit()
    disk = bench.filesystem.snapshot()
    bench.filesystem.restore(disk)
    bench.filesystem.calls = 0
    Life(bench.filesystem, Random(1), settings=bench.settings)
    for number in range(1, bench.filesystem.calls + 1):
        bench.filesystem.restore(disk)
        bench.filesystem.calls = 0
        bench.filesystem.faults[number] = code
        with pytest.raises(StorageError, match=str(DATA)):
            Life(bench.filesystem, Random(1), settings=bench.settings)


def test_t10_removal_returns_every_byte_to_every_counter() -> None:
    bench = Bench()
    life = bench.life
    for round_ in range(5):
        for number in range(20):
            life.create(f"s{number}", Random(number).randbytes(500), ttl=1)
        life.commit()
        if round_ % 2:
            bench.save()
        for number in range(20):
            life.append(f"s{number}", b"more")
        life.commit()
        for number in range(20):
            life.delete(f"s{number}")
        life.commit()
        assert life.storage.usage() == (0, 0)
    bench.save()
    life.rest()
    bench.save()
    unsaved, parts = life.storage._unsaved, life.storage.parts()
    assert not unsaved.streams
    assert life.storage.usage() == (0, 0)
    assert (parts["packs"], parts["live_bytes"], parts["dead_bytes"]) == (0, 0, 0)
    assert not any((unsaved.dirty, unsaved.removed, unsaved.being_forgotten, unsaved.removed_ids, unsaved.documents))
