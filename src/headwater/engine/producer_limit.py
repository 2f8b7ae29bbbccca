"""The limit on producers of one stream: at the limit, a new producer replaces producers that have been idle for days.

An evicted producer that retries an old append would append it twice, so a producer is evicted only at the limit and
only after days without an append. The time of the last append is part of the stream's durable state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from headwater.core.errors import TooManyProducers
from headwater.core.producers import idle_producers
from headwater.core.records import Evict
from headwater.engine.stream import LiveStream

log = logging.getLogger("headwater.engine")

EVICTED_AT_ONCE: Final = 1000
"""Producers that one record evicts. A search reads all producers of a stream, so it should not be needed often."""
DAY_MS: Final = 24 * 60 * 60 * 1000


class ProducerLimit:
    def __init__(
        self, most: int, idle_days: int, evict: Callable[[LiveStream, Evict], None], may_evict: Callable[[], bool]
    ) -> None:
        self._most = most
        """0 means no limit."""
        self._idle_days = idle_days
        self._evict = evict
        self._may_evict = may_evict

    def make_room(self, stream: LiveStream, now_ms: int) -> None:
        """Evict idle producers of a stream that has reached the limit, or refuse the new one."""
        producers = stream.producers or {}
        if not self._most or len(producers) < self._most:
            return
        if now_ms >= stream.producers_idle_ms and self._may_evict():
            idle_ms = self._idle_days * DAY_MS
            idle = idle_producers(producers, now_ms - idle_ms, EVICTED_AT_ONCE)
            if idle:
                log.warning("stream %r: evicted %d idle producers to make room for others", stream.name, len(idle))
                self._evict(stream, Evict(stream.id, now_ms, idle))
                return
            stream.producers_idle_ms = min(state.used_ms for state in producers.values()) + idle_ms
        raise TooManyProducers(
            f"The stream has {len(producers)} producers, and {self._most} is the limit"
            f" (limits.max_producers_per_stream). None of them has been idle for {self._idle_days} days. Use one of"
            " their"
            " ids with a new epoch, use another stream, or raise the limit."
        )
