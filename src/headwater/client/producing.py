"""The state of an idempotent producer: batches, sequence numbers, acknowledgements, and its epoch. No I/O.

Invariant: a batch keeps its number and its bytes from the first attempt to the last, so that the server stores it once;
and batches are sent in the order of their numbers.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Final, TypedDict

from headwater.client.effects import HttpRequest
from headwater.client.errors import ClientError, ProducerFencedError, ProducerGapError, error_of
from headwater.client.http1 import HttpResponse
from headwater.client.operations import Message, encode_message, join_messages
from headwater.client.results import ProducerStamp

BUFFERED_MAX_BYTES: Final = 16 * 1024 * 1024
BUFFERED_MAX_MESSAGES: Final = 100_000


class ProducerOptions(TypedDict, total=False):
    """Options of a producer, described in `ProducerSettings`."""

    epoch: int | None
    batch_bytes_max: int
    batch_messages_max: int
    in_flight_max: int


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    epoch: int | None = None
    """The epoch to write with. None claims an epoch higher than any before, which fences earlier instances."""
    batch_bytes_max: int = 512 * 1024
    batch_messages_max: int = 10_000
    in_flight_max: int = 5
    """How many batches are sent before the first of them is acknowledged."""


@dataclass(frozen=True, slots=True)
class ProducerBatch:
    seq: int
    body: bytes
    messages: int
    size: int


class ProducerCore:
    """The queued, sent and acknowledged batches of a producer."""

    def __init__(self, producer_id: str, url: str, settings: ProducerSettings, content_type: str = "") -> None:
        self.producer_id = producer_id
        self.content_type = content_type
        """The stream's content type; set before the first message is added."""
        self.epoch = time.time_ns() // 1_000_000 if settings.epoch is None else settings.epoch
        self.next_offset = ""
        """The offset after the last batch that is known to be stored; empty before the first."""
        self._url = url
        self._settings = settings
        self._may_claim = settings.epoch is None
        self._is_claimed = False
        self._seq = 0
        self._queue: deque[bytes] = deque()
        self._again: deque[ProducerBatch] = deque()
        self._in_flight: deque[ProducerBatch] = deque()
        self._buffered_bytes = 0
        self._buffered_messages = 0

    def add(self, message: Message) -> None:
        encoded = encode_message(message, self.content_type, alone=False)
        self._queue.append(encoded)
        self._buffered_bytes += len(encoded)
        self._buffered_messages += 1

    @property
    def is_full(self) -> bool:
        return self._buffered_bytes >= BUFFERED_MAX_BYTES or self._buffered_messages >= BUFFERED_MAX_MESSAGES

    @property
    def is_empty(self) -> bool:
        """Whether everything is stored."""
        return not self._buffered_messages

    def next_request(self) -> HttpRequest | None:
        """The next batch to send, if there is one and the window is open."""
        # Whether the epoch is accepted is known only after the first response.
        if len(self._in_flight) >= (self._settings.in_flight_max if self._is_claimed else 1):
            return None
        if self._again:
            batch = self._again.popleft()
        elif self._queue:
            batch = self._cut()
        else:
            return None
        self._in_flight.append(batch)
        stamp = ProducerStamp(self.producer_id, self.epoch, batch.seq)
        return HttpRequest("POST", self._url, "", {"Content-Type": self.content_type, **stamp.headers}, batch.body)

    def _cut(self) -> ProducerBatch:
        taken: list[bytes] = []
        size = 0
        queue, bytes_max, messages_max = self._queue, self._settings.batch_bytes_max, self._settings.batch_messages_max
        while queue and len(taken) < messages_max and (not taken or size + len(queue[0]) <= bytes_max):
            message = queue.popleft()
            taken.append(message)
            size += len(message)
        batch = ProducerBatch(self._seq, join_messages(taken, self.content_type), len(taken), size)
        self._seq += 1
        return batch

    def answered(self, response: HttpResponse) -> None:
        """Process the response to the oldest batch in flight. Raises an error if the server rejected it."""
        if response.status not in {200, 204}:
            raise error_of("POST", self._url, response.status, response.headers, response.body)
        batch = self._in_flight.popleft()
        self._is_claimed = True
        self._buffered_bytes -= batch.size
        self._buffered_messages -= batch.messages
        self.next_offset = response.headers.get("stream-next-offset", self.next_offset)

    def failed(self, error: ClientError) -> bool:
        """Queue all batches in flight to be sent again on a new connection; return whether to do so without a pause.

        Raises `error` if a retry cannot help.
        """
        if isinstance(error, ProducerFencedError):
            if not self._may_claim or self._is_claimed or error.current_epoch is None:
                raise error
            self.epoch = error.current_epoch + 1
        elif not error.is_transient and not isinstance(error, ProducerGapError):
            raise error
        while self._in_flight:
            self._again.appendleft(self._in_flight.pop())
        if not isinstance(error, ProducerFencedError):
            return False
        # Until an epoch is accepted, at most one request is in flight, and the new epoch starts with it.
        self._seq = len(self._again)
        return True

    def close_stamp(self) -> ProducerStamp:
        """The producer headers of the request that closes the stream, after everything is stored."""
        stamp = ProducerStamp(self.producer_id, self.epoch, self._seq)
        self._seq += 1
        return stamp
