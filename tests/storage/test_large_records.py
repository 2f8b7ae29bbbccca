"""Large payloads in the journal: encoded as others are, and never copied in one long call."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import msgspec
import pytest

from headwater.core.records import Append, Create, Document, Record, encode_record
from headwater.storage.filesystem import PARTS_MAX, Bytes, write_all
from headwater.storage.interface import Committed
from headwater.storage.journal import frames, large_records
from headwater.storage.journal.frames import BatchEncoder, read_batch, read_frame
from headwater.storage.journal.large_records import LARGE_BYTES
from tests.storage.simulation import run_seeds

SALT = 7
PAYLOAD = bytes(range(256)) * (LARGE_BYTES // 256)
RECORDS: tuple[Append | Create, ...] = (
    Append(3, 1, 5, 2**40, PAYLOAD, (len(PAYLOAD),)),
    Append(3, 1, 0, 0, PAYLOAD, (1,) * 70_000, "producer", 4, 2**33, "seq", True, 2**63),
    Create(9, "n" * 300, 1, "text/plain", ttl_secs=5, payload=PAYLOAD, lengths=(7, len(PAYLOAD) - 7)),
)


def batch_of(*records: Record) -> list[Committed]:
    return [Committed(record, (1, 2)) for record in records]


def encoded(batch: list[Committed]) -> bytes:
    first, rest = BatchEncoder().encode(batch, 1, SALT)
    return b"".join((first, *rest))


@pytest.mark.parametrize("record", RECORDS, ids=["append", "append of many", "create"])
def test_large_record_is_encoded_as_others_are(record: Append | Create) -> None:
    assert b"".join(large_records.encode_large(record)) == encode_record(record)


def test_batch_of_large_and_small_records_decodes_to_what_was_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Append(4, 1, 0, 0, b"small", (5,))
    document = Document("key", PAYLOAD)
    batch = batch_of(small, *RECORDS, document, small)
    whole = encoded(batch)
    monkeypatch.setattr(frames, "LARGE_BYTES", 2**40)
    assert whole == encoded(batch), "the same bytes as when everything is copied"
    monkeypatch.undo()
    frame = read_frame(memoryview(whole), 0, SALT)
    assert frame is not None
    assert frame.end == len(whole)
    assert [Committed(each.record, each.removed) for each in read_batch(frame)] == batch
    assert [Committed(each.borrowed_record, each.removed) for each in read_batch(frame)] == batch


def test_encoding_does_not_copy_a_large_payload() -> None:
    batch = batch_of(Append(3, 1, 0, 0, bytes(16 * LARGE_BYTES), (16 * LARGE_BYTES,)))
    tracemalloc.start()
    try:
        BatchEncoder().encode(batch, 1, SALT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < LARGE_BYTES


def test_decoding_for_a_checkpoint_does_not_copy_a_large_payload() -> None:
    """One call that copies 60 MiB holds the interpreter for 50 ms, on any thread."""
    batch = batch_of(Append(3, 1, 0, 0, bytes(16 * LARGE_BYTES), (16 * LARGE_BYTES,)))
    frame = read_frame(memoryview(encoded(batch)), 0, SALT)
    assert frame is not None
    tracemalloc.start()
    try:
        (logged,) = read_batch(frame)
        record = logged.borrowed_record
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < LARGE_BYTES
    assert record == batch[0].record


def test_acknowledged_writes_survive_crashes_where_payloads_are_written_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (frames, large_records):
        monkeypatch.setattr(module, "LARGE_BYTES", 100)
    apart = 0
    encode = large_records.encode_large

    def counting(record: Append | Create) -> large_records.EncodedParts:
        nonlocal apart
        apart += 1
        return encode(record)

    monkeypatch.setattr(frames, "encode_large", counting)
    run_seeds(range(4000, 4006))
    assert apart > 50


def test_record_that_is_large_without_its_payload_is_decoded() -> None:
    record = Append(3, 1, 0, 0, b"x" * 1000, (1,) * LARGE_BYTES)
    assert large_records.decode_large(memoryview(encode_record(record))) == record
    document = Document("key", PAYLOAD)
    assert large_records.decode_large(memoryview(msgspec.msgpack.encode(document))) == document


class ShortFile:
    """Accepts at most so many bytes in a call."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.data = b""
        self.calls = 0

    def write_parts(self, parts: Sequence[Bytes]) -> int:
        assert len(parts) <= PARTS_MAX
        self.calls += 1
        taken = b"".join(parts)[: self.most]
        self.data += taken
        return len(taken)

    def write(self, data: Bytes) -> int:
        return self.write_parts([data])

    def allocate(self, offset: int, length: int) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("most", [1, 2, 3, 7, 1000, 10**6])
def test_parts_are_written_whole_and_in_order_by_calls_that_write_less(most: int) -> None:
    parts: list[Bytes] = [b"", b"abc", bytearray(b"d"), b"", memoryview(b"efghij"), *([b"xy"] * 1500), b""]
    file = ShortFile(most)
    write_all(file, parts)
    assert file.data == b"".join(parts)


def test_large_batch_is_one_call() -> None:
    file = ShortFile(10**9)
    first, rest = BatchEncoder().encode(batch_of(*RECORDS), 1, SALT)
    write_all(file, (first, *rest))
    assert file.calls == 1
