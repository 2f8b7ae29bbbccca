"""Append rows exactly once: the producer headers of appends, and how to handle each response.

Producer-Id is the query, the target and the partition; Producer-Epoch the batch; Producer-Seq the append within it.
Invariant: a row that an earlier attempt appended is not appended again. If an earlier attempt appended only the first
rows, this one appends the rest; if it appended other rows, that is an error.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from headwater.spark.bodies import TargetRows, append_body, append_end, rows_of_body
from headwater.spark.errors import BadRowError, DifferingRetryError, ServerRefusedError, StreamMissingError
from headwater.spark.options import SinkOptions
from headwater.spark.protocol import Appended, Producer, StreamsClient, digest_of

log = logging.getLogger("headwater.spark")

APPENDS_MAX: Final = 16
"""Number of appends of an epoch whose digests a server keeps; they are needed to recognise a truncated append."""

_DIGEST: Final = re.compile(r"crc32:([0-9a-f]{8}):(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """The query, batch and partition of rows: the same for every attempt of a task."""

    query: str
    batch: int
    partition: str

    def producer(self, stream: str, seq: int) -> Producer:
        return Producer(f"{self.query}/{quote(stream, safe='')}/{self.partition}", self.batch, seq)


@dataclass(slots=True)
class Delivered:
    """The result of appending the rows of one target."""

    stream: str
    rows: int = 0
    bytes: int = 0
    appends: int = 0
    duplicates: int = field(default=0)
    """Appends that an earlier attempt already made."""


def deliver(
    client: StreamsClient, options: SinkOptions, origin: RowOrigin, targets: Iterable[TargetRows], *, fixed_rows: bool
) -> list[Delivered]:
    """Append the rows of each target. `fixed_rows`: every attempt has the same rows in the same order."""

    def one(target: TargetRows) -> Delivered:
        if not fixed_rows:
            _check_repeatable(options, origin, target)
        return _deliver_one(client, options, origin, target)

    wanted = list(targets)
    if len(wanted) < 2 or options.parallel_requests < 2:
        return [one(target) for target in wanted]
    with ThreadPoolExecutor(min(len(wanted), options.parallel_requests)) as pool:
        return list(pool.map(one, wanted))


def _check_repeatable(options: SinkOptions, origin: RowOrigin, target: TargetRows) -> None:
    """A task that appends its own rows must be able to recognise its appends when it is repeated."""
    if options.framing == "message":
        return
    limit = options.request_bytes_max * (APPENDS_MAX if options.order_by else 1)
    if target.bytes > limit:
        raise BadRowError(
            f"Batch {origin.batch} has {target.bytes} bytes for stream {target.stream!r} in one task; with"
            f" commitMode=task the limit is {limit} (maxRequestBytes, or {APPENDS_MAX} times that with orderBy). Use"
            " commitMode=staged, or make batches smaller (maxBytesPerBatch on the source)."
        )


def _deliver_one(client: StreamsClient, options: SinkOptions, origin: RowOrigin, target: TargetRows) -> Delivered:
    delivered = Delivered(target.stream, rows=len(target), bytes=target.bytes)
    start = seq = 0
    while start < len(target):
        end = append_end(target, start, options.framing, options.request_bytes_max)
        body = append_body(target, start, end, options.framing)
        appended = _append(client, options, target.stream, body, origin.producer(target.stream, seq))
        delivered.appends += 1
        if appended.duplicate:
            delivered.duplicates += 1
            if appended.digest is not None and appended.digest != digest_of(body):
                earlier_end = _end_of_earlier(options, target, start, appended.digest)
                if earlier_end is None:
                    raise _differing(origin, target.stream, seq, appended.digest, body)
                end = earlier_end
        start, seq = end, seq + 1
    return delivered


def _end_of_earlier(options: SinkOptions, target: TargetRows, start: int, digest: str) -> int | None:
    """The end of the rows in the body with this digest, if that body consists of our next rows; otherwise None."""
    found = _DIGEST.fullmatch(digest)
    end = rows_of_body(target, start, options.framing, int(found[2])) if found else None
    if found is None or end is None:
        return None
    body = append_body(target, start, end, options.framing)
    return end if zlib.crc32(body) == int(found[1], 16) else None


def _append(client: StreamsClient, options: SinkOptions, stream: str, body: bytes, producer: Producer) -> Appended:
    try:
        return client.append(stream, body, options.content_type, producer)
    except StreamMissingError:
        if not options.create_missing:
            raise
    try:
        client.create(stream, options.content_type)
    except ServerRefusedError as refused:
        if refused.status != 409:
            raise
        # Another client created it with other settings; the append fails if they are incompatible.
        log.info("%s", refused)
    return client.append(stream, body, options.content_type, producer)


def _differing(origin: RowOrigin, stream: str, seq: int, digest: str, body: bytes) -> DifferingRetryError:
    return DifferingRetryError(
        f"Batch {origin.batch}, partition {origin.partition}, append {seq} to stream {stream!r}: an earlier attempt"
        f" appended {digest}, this attempt has {digest_of(body)}. The rows or their order differ between attempts, so"
        " continuing would lose some rows and repeat others. Write to a new target with a new checkpoint, without"
        " commitMode=task. If this is a batch write under a producerId, the rows differ from those of the first run:"
        " use another producerId for other rows."
    )
