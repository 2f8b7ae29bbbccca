"""Decide where a batch is written: on the event loop, or on the commit thread.

On the loop a write blocks everything else for as long as it takes; on the thread it competes with the loop for the
GIL, which costs more than a short write takes. So the time that a batch will take is estimated from its size
and from recent writes, and only a short one is written on the loop; storage reports batches that take longer (a
batch that begins a journal segment waits for two syncs). A time measured on the thread includes waiting for the
GIL, so a batch is occasionally written on the loop as a probe, unless the disk has stalled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

CommitMode: TypeAlias = Literal["auto", "inline", "thread"]

INLINE_MAX_S: Final = 0.002
"""A batch that is expected to take longer is written on the thread."""
STALLED_WRITE_S: Final = 0.01
"""If a small batch takes this long, the disk has stalled: batches are written on the thread for some time."""
STALL_HOLD_MIN_S: Final = 1.0
LONG_STALL_S: Final = 0.05
LONG_STALL_HOLD_S: Final = 10.0
"""After a write of at least `LONG_STALL_S`, commits stay on the thread for at least this long."""
STALL_HOLD_MAX_S: Final = 120.0
"""The time on the thread doubles with each stall soon after another, up to this."""
PROBE_EVERY_S: Final = 0.25
"""The interval of probes on the loop while the disk is slow."""
SMALL_BATCH_BYTES: Final = 64 * 1024
"""Up to this size a write takes about as long as its sync."""
PROBE_MAX_BYTES: Final = 2 * 1024 * 1024
_BYTE_S: Final = 5e-9
"""The first estimate: 200 MB/s."""
_WEIGHT: Final = 0.2


class CommitPlacement:
    __slots__ = (
        "_byte_s",
        "_hold_s",
        "_is_held",
        "_mode",
        "_probe_at_s",
        "_stalled_at_s",
        "_sync_s",
        "_takes_long",
        "_timer",
    )

    def __init__(self, mode: CommitMode, timer: Callable[[], float]) -> None:
        self._mode = mode
        self._timer = timer
        self._sync_s = 0.0
        self._byte_s = _BYTE_S
        self._is_held = False
        """Whether a stalled disk keeps commits on the thread."""
        self._stalled_at_s = float("-inf")
        self._hold_s = STALL_HOLD_MIN_S
        self._probe_at_s = float("-inf")
        self._takes_long = False

    def on_thread(self, size_bytes: int, *, takes_long: bool = False) -> bool:
        """Whether the next batch, which has this size, should be written on the thread."""
        self._takes_long = takes_long
        if self._mode != "auto":
            return self._mode == "thread"
        if takes_long:
            return True
        is_short = self._sync_s + size_bytes * self._byte_s <= INLINE_MAX_S
        if is_short and not self._is_held:
            return False
        now_s = self._timer()
        if self._is_held and now_s < self._stalled_at_s + self._hold_s:
            return True
        self._is_held = False
        if is_short:
            return False
        if now_s < self._probe_at_s or size_bytes > PROBE_MAX_BYTES:
            return True
        self._probe_at_s = now_s + PROBE_EVERY_S
        return False

    def measured(self, size_bytes: int, seconds: float) -> None:
        """Update the estimate with the time that the batch took."""
        if self._takes_long:
            # A batch with several syncs does not predict the next one.
            return
        if size_bytes > SMALL_BATCH_BYTES:
            self._byte_s += (max(0.0, seconds - self._sync_s) / size_bytes - self._byte_s) * _WEIGHT
            return
        self._sync_s += (seconds - self._sync_s) * _WEIGHT
        if seconds >= STALLED_WRITE_S:
            self._stall(self._timer(), LONG_STALL_HOLD_S if seconds >= LONG_STALL_S else STALL_HOLD_MIN_S)

    def _stall(self, now_s: float, min_hold_s: float) -> None:
        if not self._is_held:
            is_repeated = now_s - self._stalled_at_s < 10 * self._hold_s
            self._hold_s = min(2 * self._hold_s, STALL_HOLD_MAX_S) if is_repeated else STALL_HOLD_MIN_S
        self._hold_s = max(self._hold_s, min_hold_s)
        self._is_held = True
        self._stalled_at_s = now_s
