"""Snapshots: publish, redirect to the latest, read, delete (extensions §2).

A large snapshot is written to storage while it arrives, and sent in pieces: it is never completely in memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from itertools import chain
from typing import Final

from headwater.core.content import DEFAULT_CONTENT_TYPE, check_content_type
from headwater.core.errors import SnapshotNeeded, SnapshotNotFound
from headwater.core.offsets import Offset, parse_token
from headwater.core.records import SnapshotRef
from headwater.engine.cold_reads import Pending
from headwater.engine.reading import SLICE_BYTES
from headwater.engine.snapshots import OpenSnapshot, Published
from headwater.engine.stream import LiveStream
from headwater.engine.uploads import BlobUpload, too_large
from headwater.http.context import Context
from headwater.http.headers import (
    NO_CONTENT,
    NO_STORE,
    OK,
    STREAM_CLOSED,
    TEMPORARY_REDIRECT,
    UP_TO_DATE,
    content_type,
    header,
    next_offset,
    offset_text,
)
from headwater.http.paths import Address
from headwater.http.request import Request, UploadRequest
from headwater.http.responses import Buffer, Deferred, PiecewiseResponse, Response

IN_MEMORY_MAX_BYTES: Final = SLICE_BYTES
"""A snapshot up to this size is received in memory; a larger one, or one of unknown size, is written to storage."""
NOT_UP_TO_DATE: Final = b"Stream-Up-To-Date: false\r\n"


def begin_upload(context: Context, request: Request, address: Address, is_next: bool) -> BlobUpload | None:
    """Return the upload for the body of a publish; None if it is small enough to be kept in memory.

    An invalid request is refused now, before megabytes are sent; but only if no earlier request on the
    connection is incomplete, because that one may make this one valid.
    """
    length = request.headers.get(b"content-length")
    max_bytes = context.engine.snapshots.max_bytes
    if length is not None:
        if int(length) > max_bytes:
            raise too_large(max_bytes)
        if int(length) <= min(IN_MEMORY_MAX_BYTES, context.limits.max_body_bytes):
            return None
    elif b"transfer-encoding" not in request.headers:
        return None
    stream = context.engine.snapshots.check(address.name, address.snapshot)[0] if is_next else None
    upload = context.engine.snapshots.upload()
    upload.stream_id = stream.id if stream is not None else None
    return upload


def publish(context: Context, request: Request, address: Address) -> Deferred:
    content_type = check_content_type(request.header(b"content-type") or DEFAULT_CONTENT_TYPE)
    if isinstance(request, UploadRequest) and request.upload is not None:
        upload = request.upload
    else:
        context.engine.snapshots.check(address.name, address.snapshot)
        upload = context.engine.snapshots.upload()
        upload.write(request.body)
    begin = partial(context.engine.snapshots.publish, address.name, address.snapshot, content_type, upload)
    return Deferred(begin, _render_published)


def latest(context: Context, request: Request, address: Address) -> Response:
    stream = context.engine.look_up(address.name, touch=True)
    ref = stream.durable_snapshot
    if ref is None:
        raise SnapshotNotFound(f"Stream {address.name!r} has no snapshot; read it from offset -1.")
    token = offset_of(stream, ref)
    location = b"Location: %b/%b\r\n" % (context.location(request), token.encode())
    return Response(TEMPORARY_REDIRECT, NO_STORE + location + header("Stream-Snapshot-Offset", token))


def read(context: Context, request: Request, address: Address) -> Response | PiecewiseResponse:
    stream = context.engine.look_up(address.name, touch=True)
    ref = _requested(context, stream, address)
    headers = b"".join(
        (
            NO_STORE,
            content_type(ref.content_type),
            header("Stream-Snapshot-Offset", offset_of(stream, ref)),
            next_offset(stream.id, ref.message_index, ref.byte_position),
            _state_after(stream, ref),
        )
    )
    if request.method == b"HEAD":
        return Response(OK, headers + b"Content-Length: %d\r\n" % ref.size)
    context.metrics.read_bytes += ref.size
    snapshot = context.engine.snapshots.open(stream)
    assert snapshot is not None, "checked above"
    if ref.size <= SLICE_BYTES:
        return Response(OK, headers, b"".join(pages_of(snapshot)))
    return PiecewiseResponse(OK, headers, ref.size, begun(pages_of(snapshot, waits=True)))


def delete(context: Context, request: Request, address: Address) -> Response:
    """Refuse to delete: the latest snapshot is needed, and all others are already deleted (§2.6)."""
    _requested(context, context.engine.look_up(address.name), address)
    raise SnapshotNeeded(
        "The latest snapshot cannot be deleted: the data that it replaces is no longer in the stream. Publish a newer"
        " one,"
        " which replaces it."
    )


def offset_of(stream: LiveStream, ref: SnapshotRef) -> str:
    return offset_text(stream.id, Offset(ref.message_index, ref.byte_position))


def pages_of(snapshot: OpenSnapshot, *, waits: bool = False) -> Generator[Buffer, None, None]:
    """The bytes of a snapshot in pages; it is closed after the last one, or when the iterator is closed."""
    try:
        yield from snapshot.pages(waits=waits)
    finally:
        snapshot.close()


def begun(pieces: Generator[Buffer, None, None]) -> Iterator[Buffer]:
    """Start a generator of pieces, so that closing it runs its cleanup; returns the same pieces."""
    first = next(pieces, None)
    if first is None:
        return iter(())
    if type(first) is Pending:
        # Nothing has been sent yet, so the whole request can wait.
        pieces.close()
        raise first.miss
    return chain((first,), pieces)


def _requested(context: Context, stream: LiveStream, address: Address) -> SnapshotRef:
    """The snapshot at the offset in an address; the token may have two or three parts."""
    ref = stream.durable_snapshot
    token = address.snapshot
    is_offset = parse_token(token) is not None
    if (
        ref is None
        or not is_offset
        or context.engine.reader.parse_offset(stream, token) != Offset(ref.message_index, ref.byte_position)
    ):
        raise SnapshotNotFound(
            f"Stream {address.name!r} has no snapshot at {address.snapshot!r}, or it was replaced by a newer one; GET"
            " …/snapshot leads to the latest."
        )
    return ref


def _state_after(stream: LiveStream, ref: SnapshotRef) -> bytes:
    if ref.message_index != stream.durable_index:
        return NOT_UP_TO_DATE
    return UP_TO_DATE + STREAM_CLOSED if stream.durable_closed else UP_TO_DATE


def _render_published(published: Published) -> Response:
    return Response(
        NO_CONTENT, NO_STORE + header("Stream-Snapshot-Offset", offset_text(published.stream_id, published.offset))
    )
