"""Clock jumps: a clock that is suddenly far ahead must not cause permanent deletions.

A clock that is wrong by 40 days and a real downtime of 40 days look the same. So after a large jump, streams that were
last used before it and have expired since return 404 as usual, but they are deleted only after an operator has
confirmed the new time, or after a grace time. Retention by age waits as well.

The last known time is saved every few minutes as a document, and a hold with it, so that both survive a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from headwater.core.expiry import format_instant
from headwater.engine.clock import AdjustableClock
from headwater.engine.stream import LiveStream

log = logging.getLogger("headwater.engine")

DOCUMENT_KEY: Final = "clock"
FOLLOW_MS: Final = 1000
"""The engine's clock is moved when the wall clock is this far ahead."""
SAVE_INTERVAL_MS: Final = 600_000


@dataclass(frozen=True, slots=True)
class JumpRule:
    """The size of a jump, and how long deletions are held back after it. A jump size of 0 disables the guard."""

    jump_ms: int = 0
    grace_ms: int = 0


class Jump(msgspec.Struct, frozen=True):
    """A jump after which deletions are held back."""

    from_ms: int
    """Streams last used at this time or earlier are held."""
    to_ms: int
    until_ms: int


class ClockState(msgspec.Struct, frozen=True):
    """The content of the document."""

    at_ms: int
    jump: Jump | None = None


_states: Final = msgspec.json.Decoder(ClockState)


class ClockGuard:
    def __init__(
        self, clock: AdjustableClock, rule: JumpRule, save: Callable[[bytes], bool], on_released: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._rule = rule
        self._save_document = save
        self._on_released = on_released
        self._saved_ms = 0
        self._save_interval_ms = min(SAVE_INTERVAL_MS, rule.jump_ms // 4)
        self._reported_behind = False
        self.jump: Jump | None = None
        self.jumps = 0
        self.drift_ms = 0
        """How far the wall clock is ahead of the engine's. Negative while the engine waits for it to catch up."""

    def start(self, document: bytes | None, last_used_ms: int) -> None:
        """Compare the time with that saved by the previous run. `last_used_ms` is the newest use of a stream."""
        now_ms = self._saved_ms = self._clock.now_ms()
        if not self._rule.jump_ms:
            return
        state = _decode(document) if document is not None else None
        last_ms = state.at_ms if state is not None else min(last_used_ms, now_ms)
        self.jump = state.jump if state is not None else None
        if self.jump is not None and now_ms < self.jump.to_ms:
            log.warning("the clock was set back to before its last jump, so deletions are no longer held back")
            self._finish()
        if last_ms and now_ms - last_ms >= self._rule.jump_ms:
            # The last run saved its time every few minutes, so it may have run longer than that.
            self._begin(last_ms, last_ms + self._rule.jump_ms // 2, now_ms)
        elif last_ms - now_ms >= self._rule.jump_ms:
            log.warning("the clock is behind: the last run ended at %s, now it is %s", *_instants(last_ms, now_ms))
        self._update(now_ms)

    def tick(self) -> None:
        """Move the clock forward if the wall clock is ahead, and end an expired hold. Called once a second."""
        now_ms = self._clock.now_ms()
        wall_ms = self._clock.wall_ms()
        self.drift_ms = wall_ms - now_ms
        if self.drift_ms >= FOLLOW_MS:
            if self._rule.jump_ms and self.drift_ms >= self._rule.jump_ms:
                self._begin(now_ms, now_ms, wall_ms)
            else:
                log.info("the clock moved ahead by %.1f s", self.drift_ms / 1000)
            self._clock.move_to(wall_ms)
            self.drift_ms = 0
        elif self.drift_ms <= -FOLLOW_MS and not self._reported_behind:
            log.warning(
                "the system clock was set back by %.1f s; expiry follows it after a restart", -self.drift_ms / 1000
            )
        self._reported_behind = self.drift_ms <= -FOLLOW_MS
        if self._rule.jump_ms:
            self._update(self._clock.now_ms())

    def holds(self, stream: LiveStream) -> bool:
        """Whether an expired stream is kept, because it was last used before the jump."""
        if self.jump is None:
            return False
        since_ms = stream.last_used_ms if stream.ttl_secs is not None else stream.created_ms
        return since_ms <= self.jump.from_ms

    def latest_use_ms(self, stream: LiveStream, now_ms: int) -> int:
        """The latest time at which a stream may have been used without a record of it."""
        return self.jump.from_ms if self.jump is not None and self.holds(stream) else now_ms

    def confirm(self) -> None:
        """End the hold, because an operator confirms that the time is correct."""
        if self.jump is not None:
            log.warning("the time is confirmed: the expired streams that were kept are deleted now")
            self._finish()

    def _begin(self, last_ms: int, from_ms: int, to_ms: int) -> None:
        if self.jump is not None:
            from_ms = self.jump.from_ms
        self.jump = Jump(from_ms, to_ms, to_ms + self._rule.grace_ms)
        self.jumps += 1
        log.warning(
            "the clock jumped from %s to %s: streams that expired with it return 404, and their data is kept until %s."
            " If the time is correct, `headwater store confirm-expiry` deletes it; if not, set the clock and restart.",
            *_instants(last_ms, to_ms, self.jump.until_ms),
        )
        self._saved_ms = 0

    def _finish(self) -> None:
        self.jump = None
        self._saved_ms = 0
        self._on_released()

    def _update(self, now_ms: int) -> None:
        if self.jump is not None and now_ms >= self.jump.until_ms:
            log.warning("the grace time after a clock jump has passed: expired streams are deleted now")
            self._finish()
        if now_ms - self._saved_ms >= self._save_interval_ms:
            document = msgspec.json.encode(ClockState(now_ms, self.jump))
            # If it cannot be written now, the next tick tries again.
            if self._save_document(document):
                self._saved_ms = now_ms


def _decode(document: bytes) -> ClockState | None:
    try:
        return _states.decode(document)
    except msgspec.MsgspecError as error:
        log.error("the saved time of the last run cannot be read: %s", error)
        return None


def _instants(*times_ms: int) -> tuple[str, ...]:
    return tuple(format_instant(at_ms) for at_ms in times_ms)
