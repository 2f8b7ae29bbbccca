"""Waiting for what a pipeline brings about, with a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.waiting import wait_until

Value = TypeVar("Value")

PATIENCE_S = 240.0


def eventually(look: Callable[[], Value], wanted: Callable[[Value], bool], patience_s: float = PATIENCE_S) -> Value:
    """What `look` gives once it is as wanted; the last that it gave is in the failure."""
    return wait_until(look, wanted, limit_s=patience_s, every_s=0.05)
