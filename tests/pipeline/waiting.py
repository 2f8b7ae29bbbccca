"""Wait for the result of a pipeline, with a timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.waiting import wait_until

Value = TypeVar("Value")

PATIENCE_S = 240.0


def eventually(look: Callable[[], Value], wanted: Callable[[Value], bool], patience_s: float = PATIENCE_S) -> Value:
    """Call `look` until its result is as `wanted`, and return it; a failure contains the last result."""
    return wait_until(look, wanted, limit_s=patience_s, every_s=0.05)
