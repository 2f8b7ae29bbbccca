"""Pieces: a stream has few of them, however small the appends were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from headwater.core.records import Append, Create
from headwater.storage.acid.applier import Applier
from headwater.storage.acid.pieces import KEY, PIECE_BYTES
from headwater.storage.acid.reader import ShardReader
from headwater.storage.acid.shard import Shard, make_shard
from headwater.storage.interface import CorruptError

STORE_ID = bytes(16)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    make_shard(tmp_path / "shard-00", 0, STORE_ID)
    with closing(Shard(tmp_path / "shard-00", 0, 1, 2**26, STORE_ID)) as opened:
        yield opened


def write_in_rounds(shard: Shard, messages: list[bytes], round_of: int = 1) -> int:
    """Apply messages to a shard, some per round, in one transaction; return the number of bytes written."""
    written = 0
    message_index = byte_position = 0
    with shard.environment.begin(write=True, buffers=True) as txn:
        changes = Applier(txn, shard.databases, shard.path)
        changes.apply(Create(1, "s", 1, "text/plain"))
        changes.flush()
        for at in range(0, len(messages), round_of):
            changes = Applier(txn, shard.databases, shard.path)
            for message in messages[at : at + round_of]:
                changes.apply(Append(1, 1, message_index, byte_position, message, (len(message),)))
                message_index += 1
                byte_position += len(message)
            changes.flush()
            with txn.cursor(shard.databases.data) as cursor:
                assert cursor.last()
                written += len(cursor.value())
    return written


def pieces_of(shard: Shard) -> int:
    with shard.environment.begin() as txn:
        return int(txn.stat(shard.databases.data)["entries"])


def test_many_small_rounds_leave_few_pieces(shard: Shard) -> None:
    messages = [b"%09d;" % number for number in range(20_000)]
    written = write_in_rounds(shard, messages)
    size = sum(map(len, messages))
    assert pieces_of(shard) <= size // PIECE_BYTES + 16
    assert written < 40 * size, "each byte is rewritten a few times at most"
    reader = ShardReader(shard)
    assert b"".join(reader.read(1, 0, size)) == b"".join(messages)
    assert reader.cut(1, 0, 0, 20_000, 10**6) == (20_000, size)
    assert reader.boundary(1, 12_345) == 123_450
    assert reader.lengths(1, 9_990, 10_010) == [10] * 20


@pytest.mark.parametrize("seed", range(6))
def test_messages_of_any_size_in_rounds_of_any_size_read_back(shard: Shard, seed: int) -> None:
    random = Random(seed)
    messages = [random.randbytes(random.choice((1, 50, 3000, 70_000))) for _ in range(120)]
    write_in_rounds(shard, messages, random.choice((1, 3, 20)))
    data = b"".join(messages)
    reader = ShardReader(shard)
    assert b"".join(reader.read(1, 0, len(data))) == data
    assert reader.lengths(1, 0, len(messages)) == [len(message) for message in messages]
    byte_position = 0
    for message_index, message in enumerate(messages):
        assert reader.boundary(1, message_index) == byte_position
        byte_position += len(message)


def test_a_damaged_piece_is_not_joined_with_new_bytes(shard: Shard) -> None:
    """A copy of it would get a new checksum and look intact."""
    write_in_rounds(shard, [b"damaged"])
    key = KEY.pack(1, 0)
    with shard.environment.begin(write=True) as txn:
        value = txn.get(key, db=shard.databases.data)
        assert value is not None
        txn.put(key, value[:-1] + b"?", db=shard.databases.data)
    with shard.environment.begin(write=True, buffers=True) as txn:
        changes = Applier(txn, shard.databases, shard.path)
        changes.apply(Append(1, 1, 1, 7, b"more than before", (16,)))
        changes.flush()
    assert pieces_of(shard) == 2
    reader = ShardReader(shard)
    assert b"".join(reader.read(1, 7, 23)) == b"more than before"
    with pytest.raises(CorruptError):
        reader.read(1, 0, 7)
