"""Waiting for what a pipeline brings about, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

PATIENCE_S = 240.0


def eventually(look: Callable[[], Value], wanted: Callable[[Value], bool], patience_s: float = PATIENCE_S) -> Value:
    """What `look` gives once it is as wanted; the last that it gave is in the failure."""
    deadline = time.monotonic() + patience_s
    while True:
        found = look()
        if wanted(found):
            return found
        assert time.monotonic() < deadline, f"after {patience_s:.0f} s it is still {str(found)[:2000]}"
        time.sleep(0.05)
