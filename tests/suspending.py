"""The real server on a machine that is suspended: SIGUSR1 moves the wall clock ahead, and the monotonic clock stands.

python -m tests.suspending serve --port 0
"""

from __future__ import annotations

import signal
import sys
import time

from headwater.cli import main
from headwater.engine import clock

SUSPENDED_S = 7200.0


class SuspendedTime:
    """The functions of the `time` module that the engine's clock uses."""

    def __init__(self) -> None:
        self.suspended_s = 0.0

    def time(self) -> float:
        return time.time() + self.suspended_s

    def monotonic(self) -> float:
        return time.monotonic()

    def suspend(self, *_: object) -> None:
        self.suspended_s += SUSPENDED_S


if __name__ == "__main__":
    suspended = SuspendedTime()
    vars(clock)["time"] = suspended
    signal.signal(signal.SIGUSR1, suspended.suspend)
    main(sys.argv[1:])
