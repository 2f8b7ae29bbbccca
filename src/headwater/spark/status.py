"""The status of a pipeline: the current state of each query and slot, as state events in one JSON stream.

The page "Pipeline" of the server's UI folds that stream. Invariant: publishing never blocks and never raises. A thread
sends the latest state of each query and slot, at most once per `interval_s`. While the server is unreachable, the
states are kept and sent later.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from typing import Any, Final

from headwater.spark.errors import HeadwaterError, ServerRefusedError, StreamMissingError
from headwater.spark.options import ConnectionOptions
from headwater.spark.protocol import Producer, StreamsClient

log = logging.getLogger("headwater.spark")

PIPELINE: Final = "__pipeline__"
"""The stream that the UI's page reads."""

_JSON: Final = "application/json"
_RETENTION: Final = {"Stream-Retention-Bytes": str(8 * 2**20), "Stream-Retention-Drop": "allowed"}
"""Each event has the whole state, so older events can be dropped, and folding the stream stays fast. Servers without
this extension keep them."""
_SEND_TIMEOUT_S: Final = 5.0
_HOLD_BACK_MAX_S: Final = 30.0

State = dict[str, Any]


class StatusStream:
    """A publisher of states. `publish` may be called at any rate; `close` sends the rest."""

    def __init__(
        self,
        url: str,
        stream: str = PIPELINE,
        *,
        token: str = "",
        ca_file: str = "",
        interval_s: float = 1.0,
        repeat_s: float = 0.0,
    ) -> None:
        """`repeat_s`: an unchanged state is sent again only after this many seconds."""
        self._client = StreamsClient(
            ConnectionOptions(url.rstrip("/"), token=token, ca_file=ca_file, retry_timeout_s=_SEND_TIMEOUT_S)
        )
        self._stream = stream
        self._interval_s = interval_s
        self._repeat_s = repeat_s
        self._last: dict[tuple[str, str], tuple[State, float]] = {}
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, str], State] = {}
        self._urgent = False
        self._closed = False
        self._hold_back_s = 0.0
        self._name, self._seq = _fresh_name(), 0
        self._sender = threading.Thread(target=self._send_all, name="headwater-status", daemon=True)
        self._sender.start()

    def publish(self, kind: str, key: str, state: State, *, urgent: bool = False) -> None:
        """Publish the whole state of a `query` or `slot`; it replaces the previous one."""
        now = time.monotonic()
        before, at = self._last.get((kind, key), (None, 0.0))
        if state == before and now - at < self._repeat_s:
            return
        self._last[kind, key] = state, now
        stamped = {"updated_at_ms": time.time_ns() // 1_000_000, **state}
        with self._changed:
            self._waiting[kind, key] = stamped
            self._urgent |= urgent
            self._changed.notify()

    def close(self, timeout_s: float = _SEND_TIMEOUT_S) -> None:
        """Send the states that are waiting, and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._sender.join(timeout_s)

    def _send_all(self) -> None:
        sent_at = float("-inf")
        while True:
            with self._changed:
                while not self._is_due(sent_at):
                    if self._closed and not self._waiting:
                        return
                    left_s = sent_at + self._interval_s - time.monotonic()
                    self._changed.wait(left_s if self._waiting else None)
                states, self._waiting, self._urgent = self._waiting, {}, False
            sent_at = time.monotonic()
            if self._send(states):
                self._hold_back_s = 0.0
            else:
                sent_at += self._hold_back_s
                self._hold_back_s = min(self._hold_back_s * 2 or self._interval_s, _HOLD_BACK_MAX_S)
                with self._changed:
                    if self._closed:
                        return
                    self._waiting = states | self._waiting

    def _is_due(self, sent_at: float) -> bool:
        if not self._waiting:
            return False
        return self._urgent or self._closed or time.monotonic() - sent_at >= self._interval_s

    def _send(self, states: dict[tuple[str, str], State]) -> bool:
        events = [
            {"type": kind, "key": key, "value": state, "headers": {"operation": "upsert"}}
            for (kind, key), state in states.items()
        ]
        body = json.dumps(events, default=str).encode()
        producer = Producer(self._name, 0, self._seq)
        try:
            try:
                self._client.append(self._stream, body, _JSON, producer)
            except StreamMissingError:
                with contextlib.suppress(ServerRefusedError):
                    self._client.create(self._stream, _JSON, _RETENTION)
                # A new stream does not know our producer.
                self._name, self._seq = _fresh_name(), 0
                self._client.append(self._stream, body, _JSON, Producer(self._name, 0, 0))
        except HeadwaterError as error:
            if not self._hold_back_s:
                log.warning("the status of %d queries and slots could not be published: %s", len(states), error)
            # The append may have succeeded; publishing a state twice does no harm.
            self._name, self._seq = _fresh_name(), 0
            return False
        self._seq += 1
        return True


def _fresh_name() -> str:
    return f"status-{uuid.uuid4()}"
