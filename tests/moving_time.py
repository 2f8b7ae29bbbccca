"""The real server with a clock that a test can move forward: `serve(moving_time=True)` and `Server.pass_time`.

    python -m tests.moving_time serve --port 0

Each line on stdin is a number of seconds. The clocks of the engine and of the event loop jump ahead by as much, every
timer that is due then runs, and the server logs that time has passed. In between, time runs as usual. A test uses
periods of an hour or more, so that what the machine is doing cannot bring them to an end.

It runs on asyncio's own event loop, because the clock of uvloop is out of reach.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import ClassVar

import uvloop

from headwater.cli import main
from headwater.engine.clock import SteadyClock
from headwater.http import server
from tests.serving import TIME_HAS_PASSED

TURNS = 10
"""Iterations of the loop before the move is reported: timers that were due have run, and what they put off as well."""


class MovingClock(SteadyClock):
    """The engine's clock, ahead by `moved_s`."""

    __slots__ = ()
    moved_s: ClassVar = 0.0

    def now_ms(self) -> int:
        return super().now_ms() + int(self.moved_s * 1000)

    def wall_ms(self) -> int:
        return super().wall_ms() + int(self.moved_s * 1000)

    def move_to(self, now_ms: int) -> None:
        super().move_to(now_ms - int(self.moved_s * 1000))


class MovingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._moves = 0
        self.add_reader(sys.stdin.fileno(), self._read_moves)

    def time(self) -> float:
        return super().time() + MovingClock.moved_s

    def _read_moves(self) -> None:
        lines = os.read(sys.stdin.fileno(), 65_536)
        if not lines:
            self.remove_reader(sys.stdin.fileno())
        for line in lines.splitlines():
            MovingClock.moved_s += float(line)
            self._moves += 1
            self._report(TURNS, self._moves)

    def _report(self, turns: int, move: int) -> None:
        if turns:
            self.call_soon(self._report, turns - 1, move)
        else:
            sys.stderr.write(f"{TIME_HAS_PASSED.format(move)}\n")
            sys.stderr.flush()


if __name__ == "__main__":
    vars(server)["SteadyClock"] = MovingClock
    uvloop.new_event_loop = MovingLoop  # type: ignore[assignment]
    main(sys.argv[1:])
