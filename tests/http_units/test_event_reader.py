"""An event reader over a real engine: what goes out when its socket, its stream and time move."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.core.offsets import ZERO
from headwater.http import app  # noqa: F401 -- read and sse import each other: the application goes first
from headwater.http.sse import EventReader
from tests.engine.rig import Rig


class Socket:
    """The part of a connection that an event reader uses, as a list of what was written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.paused = False
        self.live: object = None
        self.request = SimpleNamespace(http_1_0=True)
        self.transport = SimpleNamespace(write=self.written.append)

    def end_events(self) -> None:
        self.live = None

    def data(self) -> list[bytes]:
        lines = b"".join(self.written).split(b"\n")
        return [line.removeprefix(b"data:") for event, line in pairwise(lines) if event == b"event: data"]


def reader_of(rig: Rig, name: str) -> tuple[EventReader, Socket]:
    shared = SimpleNamespace(
        engine=rig.engine, metrics=rig.engine.metrics, sse_deadlines=None, cursor_interval_secs=20, draining=False
    )
    socket = Socket()
    stream = rig.engine.look_up(name, touch=True)
    reader = EventReader(cast(Any, shared), cast(Any, socket), stream, ZERO, None)
    rig.engine.follow(stream, reader)
    rig.engine.metrics.followers["sse"] += 1
    reader.open()
    return reader, socket


@pytest.mark.parametrize("disk", [False, True])
def test_a_reader_gets_each_message_once(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.there("a", b"one")
    _, socket = reader_of(rig, "a")
    rig.post("a", b"two")
    rig.scheduler.settle()
    assert socket.data() == [b"one", b"two"]


def test_a_reader_that_was_slow_on_a_stream_with_a_window_gets_each_message_once() -> None:
    """The socket is full for longer than a share of the window; then the reader goes on from the log."""
    rig = Rig(disk=False)
    rig.there("a", ttl_secs=16)
    reader, socket = reader_of(rig, "a")
    socket.paused = True
    rig.post("a", b"one")
    rig.clock.at_ms += 5000
    socket.paused = False
    reader.writable()
    assert socket.data() == [b"one"]
