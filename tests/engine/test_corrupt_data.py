"""Corrupt storage: every read of damaged data is refused with `data_corrupt`, whichever call finds the damage."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from headwater.core.errors import DataCorrupt, StorageUnavailable
from headwater.core.offsets import Offset
from headwater.core.rules import ForkRequest
from headwater.engine.engine import Engine
from headwater.engine.stream import LiveStream
from headwater.storage.interface import CorruptError, StorageError
from tests.engine.rig import Rig

ZERO, MIDDLE, END = Offset(0, 0), Offset(2, 20), Offset(4, 40)

READS: dict[str, Callable[[Engine, LiveStream], object]] = {
    "resolve": lambda engine, stream: engine.reader.resolve(stream, str(MIDDLE)),
    "boundary": lambda engine, stream: engine.reader.boundary(stream, 2),
    "chunk": lambda engine, stream: engine.reader.chunk(stream, ZERO, 15),
    "run": lambda engine, stream: engine.reader.run(stream, ZERO, END, 15),
    "fork_point": lambda engine, stream: engine.reader.fork_point(stream, ForkRequest("a", str(MIDDLE), 0)),
    "buffers": lambda engine, stream: engine.reader.buffers(engine.reader.chunk(stream, ZERO, 1000)),
    "slices": lambda engine, stream: engine.reader.slices(engine.reader.chunk(stream, ZERO, 1000)),
    "lengths": lambda engine, stream: engine.reader.lengths(engine.reader.chunk(stream, ZERO, 1000)),
    "snapshot": lambda engine, _: engine.snapshots.check("a", str(MIDDLE)),
}


def damage(rig: Rig, monkeypatch: pytest.MonkeyPatch, error: StorageError) -> None:
    def fail(*_: Any) -> Any:
        raise error

    for method in ("boundary", "cut", "lengths", "read"):
        monkeypatch.setattr(rig.storage, method, fail)


def a_stream(rig: Rig) -> LiveStream:
    stream = rig.created("a")
    for _ in range(4):
        rig.post("a", b"0123456789")
    rig.scheduler.run_until_idle()
    return stream


@pytest.mark.parametrize("read", READS)
def test_damaged_data_is_refused(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    stream = a_stream(rig)
    damage(rig, monkeypatch, CorruptError("pack 7 is damaged at byte 12"))
    with pytest.raises(DataCorrupt, match="'a'") as refusal:
        READS[read](rig.engine, stream)
    assert "pack 7" not in refusal.value.detail, "the location of the damage is only logged"


def test_damage_is_logged_once_per_stream(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    stream = a_stream(rig)
    damage(rig, monkeypatch, CorruptError("pack 7 is damaged at byte 12"))
    with caplog.at_level(logging.ERROR, "headwater.engine"):
        for _ in range(3):
            with pytest.raises(DataCorrupt):
                rig.engine.reader.boundary(stream, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "stored data of stream 'a' cannot be read: pack 7 is damaged at byte 12"
    ]


def test_temporary_read_error_is_not_reported_as_corruption(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    stream = a_stream(rig)
    damage(rig, monkeypatch, StorageError("too many readers"))
    with pytest.raises(StorageUnavailable):
        rig.engine.reader.boundary(stream, 2)


def test_damage_after_the_first_slice_ends_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.created("a", b"x" * 600_000)
    slices = rig.engine.reader.slices(rig.engine.reader.chunk(rig.engine.look_up("a"), ZERO, 1 << 20))
    damage(rig, monkeypatch, CorruptError("damaged"))
    assert len(next(slices)) == 256 * 1024
    with pytest.raises(DataCorrupt):
        next(slices)
