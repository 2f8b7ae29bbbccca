"""HEAD: describe a stream without its data and without restarting its TTL (protocol §5.5)."""

from __future__ import annotations

from typing import Final

from headwater.core.expiry import format_instant
from headwater.core.fencing import FenceState
from headwater.core.offsets import Offset
from headwater.core.records import RetentionPolicy
from headwater.core.retention import AGE_HEADER, BYTES_HEADER, DROP_HEADER
from headwater.http.context import Context
from headwater.http.headers import (
    NO_STORE,
    OK,
    STREAM_CLOSED,
    WRITE_FENCE,
    header,
    next_offset,
    next_position,
    offset_text,
)
from headwater.http.paths import Address
from headwater.http.read import earliest_offset, since, since_offset
from headwater.http.request import Request
from headwater.http.responses import Response
from headwater.http.snapshots import offset_of

EXTENSIONS: Final = b"Stream-Extensions: until, splits, frames, position, digest, lease, since, times, find\r\n"
"""The extensions of this server (docs/extensions.md), so that a client can detect them."""


def handle(context: Context, request: Request, address: Address) -> Response:
    stream = context.engine.look_up(address.name)
    headers = [
        NO_STORE,
        header("Content-Type", stream.type.header),
        next_offset(stream.id, stream.durable_index, stream.durable_position),
        next_position(stream.durable_index),
        EXTENSIONS,
        header("Stream-Last-Write-At", format_instant(stream.written_ms)),
    ]
    if stream.ttl_secs is not None:
        headers.append(b"Stream-TTL: %d\r\n" % stream.ttl_secs)
    if stream.expires_at_ms is not None:
        headers.append(header("Stream-Expires-At", format_instant(stream.expires_at_ms)))
    if stream.durable_snapshot is not None:
        headers.append(header("Stream-Snapshot-Offset", offset_of(stream, stream.durable_snapshot)))
    headers.append(earliest_offset(stream))
    if "since" in address.query:
        headers.append(since_offset(stream, since(context, stream, address.query)))
    if stream.retention is not None:
        headers.append(_retention(stream.retention))
    if stream.durable_closed:
        headers.append(STREAM_CLOSED)
    fence = context.engine.fences.streams.get(stream.id)
    if fence is not None:
        headers.append(_fence(stream.id, fence))
    return Response(OK, b"".join(headers))


def _retention(policy: RetentionPolicy) -> bytes:
    """The retention policy that the stream was created with."""
    lines = []
    if policy.max_age_secs is not None:
        lines.append(header(AGE_HEADER, str(policy.max_age_secs)))
    if policy.max_bytes is not None:
        lines.append(header(BYTES_HEADER, str(policy.max_bytes)))
    if policy.may_drop is not None:
        lines.append(header(DROP_HEADER, "allowed" if policy.may_drop else "never"))
    return b"".join(lines)


def _fence(stream_id: int, fence: FenceState) -> bytes:
    """The headers of a fenced stream: that only claims may write, and the last sealed generation."""
    if fence.sealed_generation is None or fence.sealed_at is None:
        return WRITE_FENCE
    return b"%bWrite-Fence-Sealed-Generation: %d\r\n%b" % (
        WRITE_FENCE,
        fence.sealed_generation,
        header("Write-Fence-Sealed-Offset", offset_text(stream_id, Offset(*fence.sealed_at))),
    )
