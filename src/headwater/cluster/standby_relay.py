"""Relay a read to the standby of its shard on the same node, and to the owner if the standby does not answer.

A standby answers a read or declines it, before the first byte of a response: it does not report errors itself. A read
that it declines, or that it had when it ended, is relayed to the owner as any other. The owner counts the requests that
it answers; those that a standby answers are counted here, because the metrics of a standby are not reported.
"""

from __future__ import annotations

from time import perf_counter
from typing import Final

from headwater.cluster import frames
from headwater.cluster.relay import Relay, RelayedAnswer, begin_request, request_bytes
from headwater.engine.metrics import Metrics
from headwater.http.context import Context
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.routing import Handler

_STATUS: Final = slice(9, 12)
"""Of the first line of a response."""


class StandbyAnswer(RelayedAnswer):
    """A read that the standby answers, or else the owner."""

    __slots__ = ("_began_s", "_is_at_standby", "_may_ask", "_metrics", "_operation")

    def __init__(self, relay: Relay, worker: int, data: bytes, metrics: Metrics, operation: str) -> None:
        super().__init__(relay, worker, data, True, frames.BEGIN)
        self._metrics = metrics
        self._operation = operation
        self._began_s = perf_counter()
        self._may_ask = len(data) <= frames.PAYLOAD_MAX_BYTES
        self._is_at_standby = False

    def on_whole(self, data: bytes) -> None:
        self._count(data)
        super().on_whole(data)

    def on_data(self, data: bytes) -> None:
        self._count(data)
        super().on_data(data)

    def on_cut(self) -> None:
        if self._is_at_standby and not self._has_begun:
            self._is_at_standby = False
            self.on_peer_lost()  # It is repeated, at the owner.
        else:
            super().on_cut()

    def _send(self) -> None:
        standbys = self._relay.standbys
        standby = standbys.get(self.worker) if standbys is not None and self._may_ask else None
        self._may_ask = False
        self._is_at_standby = standby is not None
        if standby is None:
            super()._send()
        else:
            assert self._channel is not None, "the client waits for the response"
            origin = self._channel.origin or self._channel.find_origin()
            self._peer = standby
            self._number = begin_request(standby, self, self._begin, origin, self._data)

    def _count(self, data: bytes) -> None:
        if self._is_at_standby and not self._has_begun and self._channel is not None:
            self._metrics.standby_reads += 1
            self._metrics.count_request(self._operation, int(data[_STATUS]), perf_counter() - self._began_s)


def to_standby(relay: Relay, worker: int, operation: str) -> Handler:
    """The handler of reads that the standby of a shard may answer."""

    def handle(context: Context, request: Request, _address: Address) -> StandbyAnswer:
        return StandbyAnswer(relay, worker, request_bytes(request), context.metrics, operation)

    return handle
