"""Retention by age and size: what may be dropped from the front of a stream, and when (an extension of the protocol).

Headers of the create request, or the server's defaults, say how much a stream keeps. Nothing is ever dropped
unless a snapshot covers it or dropping was allowed. Publishing a snapshot moves the earliest retained offset at once,
so age and size act only on streams without a snapshot: what follows a snapshot stays until the next one covers it.

The age of messages is known from marks: "messages before this offset were appended at this time or earlier". A stream
keeps a bounded number of marks. When there are too many, every other one is removed and new ones are made half as
often. A message is never dropped before its time, and at the latest one step after it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from headwater.core.errors import BadRequest
from headwater.core.records import AgeIndex, RetentionPolicy

AGE_HEADER: Final = "Stream-Retention-Age"
BYTES_HEADER: Final = "Stream-Retention-Bytes"
DROP_HEADER: Final = "Stream-Retention-Drop"

MARKS_MAX: Final = 64
STEP_MIN_MS: Final = 1000
SLACK_SHARE: Final = 8
"""A stream may exceed its size limit by this fraction (1/8) before its front is dropped, so that not every append drops
something."""

_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_MAY_DROP: Final = {"allowed": True, "never": False}
_NUMBER_MAX: Final = 2**53 - 1


class AgeMarks:
    """Each mark is (milliseconds, message_index, byte_position): messages before it were appended at that time or
    earlier."""

    __slots__ = ("_marks", "_step_ms")

    def __init__(self, index: AgeIndex) -> None:
        self._step_ms = index.step_ms
        self._marks = list(index.marks)

    def note(self, now_ms: int, written_ms: int, message_index: int, byte_position: int) -> None:
        """Record an append at (message_index, byte_position); the messages before it were complete at `written_ms`."""
        marks = self._marks
        if marks:
            if now_ms - marks[-1][0] < self._step_ms:
                return
        elif not message_index:
            return
        marks.append((written_ms, message_index, byte_position))
        if len(marks) > MARKS_MAX:
            # Without a mark, these messages are covered by the next one.
            del marks[::2]
            self._step_ms *= 2

    def last_until(self, at_ms: int) -> tuple[int, int] | None:
        """Message index and byte position of the last mark that was made at `at_ms` or before."""
        at = bisect_right(self._marks, at_ms, key=_time_of)
        return self._marks[at - 1][1:] if at else None

    def forget(self, message_index: int) -> None:
        """Remove marks at `message_index` or before."""
        del self._marks[: bisect_right(self._marks, message_index, key=_index_of)]

    def saved(self) -> AgeIndex:
        return AgeIndex(self._step_ms, tuple(self._marks))


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """The limits that apply to a stream; 0 means no limit."""

    max_age_ms: int = 0
    max_bytes: int = 0
    may_drop: bool = False

    def of(self, policy: RetentionPolicy | None) -> RetentionRule:
        """The rule of a stream: its own policy, completed from this rule, which is the server's."""
        if policy is None:
            return self
        return RetentionRule(
            self.max_age_ms if policy.max_age_secs is None else policy.max_age_secs * 1000,
            self.max_bytes if policy.max_bytes is None else policy.max_bytes,
            self.may_drop if policy.may_drop is None else policy.may_drop,
        )

    @property
    def drops(self) -> bool:
        return self.may_drop and bool(self.max_age_ms or self.max_bytes)

    @property
    def tracks_age(self) -> bool:
        """Whether the age of messages matters."""
        return self.may_drop and bool(self.max_age_ms)


def parse_policy(age: str | None, size: str | None, drop: str | None) -> RetentionPolicy | None:
    """Parse the retention headers of a create; None if there are none."""
    if age is None and size is None and drop is None:
        return None
    if drop is not None and drop.lower() not in _MAY_DROP:
        raise BadRequest(f"{DROP_HEADER} must be allowed or never, not {drop!r}.")
    return RetentionPolicy(
        _number(AGE_HEADER, "seconds", age),
        _number(BYTES_HEADER, "bytes", size),
        _MAY_DROP[drop.lower()] if drop is not None else None,
    )


def _number(header: str, unit: str, text: str | None) -> int | None:
    if text is None:
        return None
    if _NUMBER.fullmatch(text) is None or int(text) > _NUMBER_MAX:
        raise BadRequest(
            f"{header} must be a whole number of {unit} without sign or leading zeros (0 keeps all), not {text!r}."
        )
    return int(text)


def _time_of(mark: tuple[int, int, int]) -> int:
    return mark[0]


def _index_of(mark: tuple[int, int, int]) -> int:
    return mark[1]
