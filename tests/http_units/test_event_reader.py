"""An event reader over a real engine, with a simulated socket and clock."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.core.offsets import ZERO
from headwater.http.request import Request
from headwater.http.sse import HOLD_S, STEP_MESSAGES, EventReader
from tests.engine.rig import Rig


class Timer:
    def __init__(self, delay_s: float, action: Any) -> None:
        self.delay_s, self.action, self.cancelled = delay_s, action, False

    def cancel(self) -> None:
        self.cancelled = True


class Socket:
    """The channel of an event reader, which records what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.writable = True
        self.ended = False
        self.turns = 0

    def begin_body(self, headers: bytes) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def offer_chunk(self, chunk: bytes) -> bool:
        if self.writable:
            size, _, rest = chunk.partition(b"\r\n")
            self.written.append(rest[: int(size, 16)])
        return self.writable

    def yield_turn(self) -> None:
        self.turns += 1

    def end_body(self) -> None:
        self.ended = True

    def of_kind(self, kind: bytes) -> list[bytes]:
        lines = b"".join(self.written).split(b"\n")
        return [line.removeprefix(b"data:") for event, line in pairwise(lines) if event == b"event: " + kind]

    def data(self) -> list[bytes]:
        return self.of_kind(b"data")

    def controls(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.of_kind(b"control")]


class Readers:
    """Event readers of one engine, with a clock for cursors."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.timers: list[Timer] = []
        self.context = SimpleNamespace(
            engine=rig.engine,
            metrics=rig.engine.metrics,
            sse_deadlines=None,
            compresses_events=False,
            current_cursor="100",
            cursor=lambda echoed: "100" if echoed is None else str(int(echoed) + 7),
            loop=SimpleNamespace(call_later=self.call_later),
        )

    def call_later(self, delay_s: float, action: Any) -> Timer:
        self.timers.append(Timer(delay_s, action))
        return self.timers[-1]

    def open(self, name: str, *, cursor: str | None = None, http_1_0: bool = False) -> tuple[EventReader, Socket]:
        request = Request(b"GET", b"/", {}, b"", http_1_0, True)
        socket = Socket()
        stream = self.rig.engine.look_up(name, touch=True)
        reader = EventReader(cast(Any, self.context), request, stream, ZERO, cursor)
        reader.start(cast(Any, socket))
        return reader, socket


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("http_1_0", [False, True])
def test_a_reader_gets_each_message_once(disk: bool, http_1_0: bool) -> None:
    rig = Rig(disk=disk)
    rig.created("a", b"one")
    _, socket = Readers(rig).open("a", http_1_0=http_1_0)
    rig.post("a", b"two")
    rig.scheduler.run_until_idle()
    assert socket.data() == [b"one", b"two"]


def test_slow_reader_of_a_stream_with_a_ttl_gets_each_message_once() -> None:
    """The socket is full for longer than a share of the window; then the reader continues from storage."""
    rig = Rig(disk=False)
    rig.created("a", ttl_secs=16)
    reader, socket = Readers(rig).open("a")
    socket.writable = False
    rig.post("a", b"one")
    rig.clock.at_ms += 5000
    socket.writable = True
    reader.on_writable()
    assert socket.data() == [b"one"]


def test_a_frame_of_an_earlier_interval_is_not_reused() -> None:
    """Seed 001, line 430: a cursor that a reader holds is never answered with a smaller one."""
    rig = Rig(disk=False)
    rig.created("a", b"one")
    readers = Readers(rig)
    readers.open("a")
    readers.context.current_cursor = "103"
    readers.context.cursor = lambda _: "103"
    _, late = readers.open("a")
    assert [control["streamCursor"] for control in late.controls()] == ["103"]


def test_a_cursor_that_is_ahead_of_the_clock_is_kept_until_the_clock_passes_it() -> None:
    """Seed 001, line 433: the jitter is added once, not for every event."""
    rig = Rig(disk=False)
    rig.created("a", b"one")
    readers = Readers(rig)
    _, ahead = readers.open("a", cursor="150")
    _, plain = readers.open("a")
    rig.post("a", b"two")
    readers.context.current_cursor = "158"
    rig.post("a", b"three")
    assert [control["streamCursor"] for control in ahead.controls()] == ["157", "157", "158"]
    assert [control["streamCursor"] for control in plain.controls()] == ["100", "100", "158"]
    assert ahead.data() == plain.data() == [b"one", b"two", b"three"]


def test_incomplete_character_is_held_back_and_the_reader_is_not_up_to_date() -> None:
    """Seed 001, lines 308, 320 and 323."""
    rig = Rig(disk=False)
    rig.created("a", b"caf\xc3")
    readers = Readers(rig)
    _, socket = readers.open("a")
    assert socket.data() == []
    assert "upToDate" not in socket.controls()[-1]
    [timer] = readers.timers
    assert timer.delay_s == HOLD_S
    timer.action()
    assert socket.data() == [b"caf\xc3"]
    assert socket.controls()[-1]["upToDate"] is True


def test_the_rest_of_a_character_releases_what_is_held_back() -> None:
    rig = Rig(disk=False)
    rig.created("a", b"caf\xc3")
    readers = Readers(rig)
    _, socket = readers.open("a")
    rig.post("a", b"\xa9!")
    assert socket.data() == ["café!".encode()]
    assert readers.timers[0].cancelled


def test_many_small_messages_are_sent_in_bounded_steps() -> None:
    rig = Rig(disk=False)
    rig.created("a")
    for _ in range(3 * STEP_MESSAGES):
        rig.post("a", b"x")
    _, socket = Readers(rig).open("a")
    assert socket.data() == [b"x"] * (3 * STEP_MESSAGES)
    assert max(piece.count(b"event: data") for piece in socket.written) <= STEP_MESSAGES


def test_large_message_is_sent_in_pieces_as_the_socket_accepts_them() -> None:
    rig = Rig(disk=False)
    rig.created("a", b"x" * 1_000_000)
    readers = Readers(rig)
    reader, socket = readers.open("a")
    # Not in one call, because all readers of a stream are woken together.
    assert socket.turns == 1
    reader.on_writable()
    assert socket.data() == [b"x" * 1_000_000]
    assert max(map(len, socket.written)) <= 300_000
    assert len(socket.controls()) == 1
    assert socket.controls()[0]["upToDate"] is True
    socket.writable = False
    rig.post("a", b"y" * 600_000)
    rig.post("a", b"z")
    for _ in range(20):
        socket.writable = True
        reader.on_writable()
    assert socket.data()[1:] == [b"y" * 600_000, b"z"]


def test_corrupt_data_ends_the_event_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(disk=False)
    rig.created("a", b"one")
    _, socket = Readers(rig).open("a")

    def fails(*_: object) -> None:
        raise RuntimeError("damaged")

    monkeypatch.setattr(rig.engine.reader, "chunk", fails)
    rig.post("a", b"two")
    assert socket.ended
