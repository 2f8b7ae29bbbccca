"""A server with a slow disk: every sync takes five milliseconds longer. Arguments are those of `headwater`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from headwater import operating_system
from headwater.cli import main

SYNC_S = 0.005


def slow_down() -> None:
    system = type(operating_system.SYSTEM)
    for name in ("sync_data", "sync_file"):
        setattr(system, name, _slowed(getattr(system, name)))


def _slowed(sync: Callable[[object, int], None]) -> Callable[[object, int], None]:
    def slow(self: object, descriptor: int) -> None:
        time.sleep(SYNC_S)
        sync(self, descriptor)

    return slow


if __name__ == "__main__":
    slow_down()
    main(sys.argv[1:])
