"""Appending exactly once: who appends what under which name, and what an answer means.

Producer-Id is the query, the target and the partition; Producer-Epoch the batch; Producer-Seq the append within it.
Invariant: an append that was taken is never taken again, and a repeat that brings other bytes is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import quote

from headwater.spark.bodies import TargetRows, json_bodies, line_body
from headwater.spark.errors import BadRow, DifferingRetry, ServerRefused, StreamMissing
from headwater.spark.options import SinkOptions
from headwater.spark.protocol import Appended, Client, Producer, digest_of

log = logging.getLogger("headwater.spark")


@dataclass(frozen=True, slots=True)
class Source:
    """Whose rows these are: stable over retries, restarts and speculation."""

    query: str
    batch: int
    partition: str

    def producer(self, stream: str, seq: int) -> Producer:
        return Producer(f"{self.query}/{quote(stream, safe='')}/{self.partition}", self.batch, seq)


@dataclass(slots=True)
class Delivered:
    """What became of the rows of one target."""

    stream: str
    rows: int = 0
    bytes: int = 0
    appends: int = 0
    duplicates: int = field(default=0)
    """Appends that an earlier attempt had made."""


def deliver(
    client: Client, options: SinkOptions, source: Source, targets: Iterable[TargetRows], *, fixed_order: bool
) -> list[Delivered]:
    """Append the rows of each target. `fixed_order`: a retry is certain to bring them in the same order."""

    def one(target: TargetRows) -> Delivered:
        return _deliver_one(client, options, source, target, fixed_order)

    wanted = list(targets)
    if len(wanted) < 2 or options.parallel_requests < 2:
        return [one(target) for target in wanted]
    with ThreadPoolExecutor(min(len(wanted), options.parallel_requests)) as pool:
        return list(pool.map(one, wanted))


def _deliver_one(
    client: Client, options: SinkOptions, source: Source, target: TargetRows, fixed_order: bool
) -> Delivered:
    if target.bytes > options.request_bytes_max and not fixed_order:
        raise BadRow(
            f"Batch {source.batch} has {target.bytes} bytes for stream {target.stream!r} in one task; one append takes"
            f" {options.request_bytes_max} (maxRequestBytes). Several appends are safe only in an order that a retry"
            " repeats: set orderBy to a unique key. Or make batches smaller (maxBytesPerBatch on the source), or use"
            " commitMode=staged."
        )
    delivered = Delivered(target.stream, rows=len(target.values), bytes=target.bytes)
    for seq, body in enumerate(_bodies(options, target)):
        appended = _append(client, options, target.stream, body, source.producer(target.stream, seq))
        delivered.appends += 1
        if appended.duplicate:
            delivered.duplicates += 1
            _check_same(options, source, target.stream, seq, body, appended)
    return delivered


def _bodies(options: SinkOptions, target: TargetRows) -> Iterable[bytes]:
    if options.is_json:
        return json_bodies(target, options.request_bytes_max)
    if options.rows_as == "lines":
        return (line_body(target),)
    rows: list[bytes] = target.values.to_pylist()
    return rows


def _append(client: Client, options: SinkOptions, stream: str, body: bytes, producer: Producer) -> Appended:
    try:
        return client.append(stream, body, options.content_type, producer)
    except StreamMissing:
        if not options.create_missing:
            raise
    try:
        client.create(stream, options.content_type)
    except ServerRefused as refused:
        if refused.status != 409:
            raise
        # Somebody else has created it meanwhile, with other settings: the append tells whether it fits.
        log.info("%s", refused)
    return client.append(stream, body, options.content_type, producer)


def _check_same(options: SinkOptions, source: Source, stream: str, seq: int, body: bytes, appended: Appended) -> None:
    if appended.digest is None or appended.digest == digest_of(body):
        return
    trouble = (
        f"Batch {source.batch}, partition {source.partition}, append {seq} to stream {stream!r}: an earlier attempt"
        f" appended {appended.digest}, this one brings {digest_of(body)}."
    )
    if options.on_differing_retry == "keep":
        log.warning("%s Kept the first.", trouble)
        return
    raise DifferingRetry(
        f"{trouble} The rows, or their order, differ between attempts, so going on would lose some and repeat others."
        " If there is a shuffle before the sink, set orderBy to a unique key; if the rows themselves are made anew on"
        " each attempt, use commitMode=driver or staged. To keep what the stream has: onDifferingRetry=keep."
    )
