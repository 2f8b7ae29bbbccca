"""Snapshots: publish, find the latest, read, delete (extensions §2).

A large snapshot goes to its place while it arrives, and leaves it a slice at a time: it is never in memory whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from headwater.core.content import DEFAULT_CONTENT_TYPE, check_content_type
from headwater.core.errors import SnapshotNeeded, SnapshotNotFound
from headwater.core.offsets import Offset
from headwater.core.records import SnapshotRef
from headwater.engine.reading import SLICE_BYTES
from headwater.engine.snapshots import OpenSnapshot, Published
from headwater.engine.stream import LiveStream
from headwater.engine.uploads import BlobUpload, too_large
from headwater.http.create import location
from headwater.http.request import Request, UploadRequest
from headwater.http.response import (
    NO_CONTENT,
    NO_STORE,
    OK,
    STREAM_CLOSED,
    TEMPORARY_REDIRECT,
    UP_TO_DATE,
    content_type,
    header,
    next_offset,
)

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection

HELD_MAX_BYTES: Final = SLICE_BYTES
"""A snapshot of this size is simply held until it has arrived; a larger one, or one of unknown size, is not."""
NOT_UP_TO_DATE: Final = b"Stream-Up-To-Date: false\r\n"


def begin_upload(app: App, request: Request, target: Target, *, is_next: bool) -> BlobUpload | None:
    """Where the body of a publish goes while it arrives; None where it is small enough to be held.

    What can be refused is refused now, before megabytes were sent in vain; but only when no earlier request on the
    connection is still to be answered, because that one may be what makes this one right.
    """
    length = request.headers.get(b"content-length")
    max_bytes = app.engine.snapshots.max_bytes
    if length is not None:
        if int(length) > max_bytes:
            raise too_large(max_bytes)
        if int(length) <= min(HELD_MAX_BYTES, app.max_body_bytes):
            return None
    elif b"transfer-encoding" not in request.headers:
        return None
    stream = app.engine.snapshots.check(target.name, target.snapshot)[0] if is_next else None
    upload = app.engine.snapshots.upload()
    upload.stream_id = stream.id if stream is not None else None
    return upload


def publish(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "publish_snapshot"
    content_type = check_content_type(request.header(b"content-type") or DEFAULT_CONTENT_TYPE)
    if isinstance(request, UploadRequest):
        upload = request.upload
    else:
        app.engine.snapshots.check(target.name, target.snapshot)
        upload = app.engine.snapshots.upload()
        upload.write(request.body)
    answer = partial(connection.settle, _render_published)
    app.engine.snapshots.publish(target.name, target.snapshot, content_type, upload, answer)


def latest(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "latest_snapshot"
    stream = app.engine.look_up(target.name, touch=True)
    ref = stream.durable_snapshot
    if ref is None:
        raise SnapshotNotFound(f"Stream {target.name!r} has no snapshot.")
    token = offset_of(ref)
    where = b"Location: %b/%b\r\n" % (location(connection), token.encode())
    connection.reply(TEMPORARY_REDIRECT, NO_STORE + where + header("Stream-Snapshot-Offset", token))


def read(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "read_snapshot"
    stream = app.engine.look_up(target.name, touch=True)
    ref = _asked_for(stream, target)
    headers = b"".join(
        (
            NO_STORE,
            content_type(ref.content_type),
            header("Stream-Snapshot-Offset", offset_of(ref)),
            next_offset(ref.index, ref.position),
            _state_after(stream, ref),
        )
    )
    if request.method == b"HEAD":
        connection.reply(OK, headers + b"Content-Length: %d\r\n" % ref.size)
        return
    app.metrics.read_bytes += ref.size
    snapshot = app.engine.snapshots.open(stream)
    assert snapshot is not None, "it was just found"
    if ref.size <= SLICE_BYTES:
        connection.reply(OK, headers, b"".join(slices_of(snapshot)))
    else:
        connection.reply_slices(OK, headers, ref.size, begun(slices_of(snapshot)))


def delete(app: App, connection: Connection, request: Request, target: Target) -> None:
    """The latest snapshot is needed and any other is gone already, so nothing is ever deleted here (§2.6)."""
    connection.operation = "delete_snapshot"
    _asked_for(app.engine.look_up(target.name), target)
    raise SnapshotNeeded("The latest snapshot cannot be deleted: what it stands for is no longer in the stream.")


def offset_of(ref: SnapshotRef) -> str:
    return str(Offset(ref.index, ref.position))


def slices_of(snapshot: OpenSnapshot) -> Iterator[bytes]:
    """The bytes of a snapshot, page by page; it is closed behind the last one, or when nobody asks for more."""
    try:
        yield from snapshot.pages()
    finally:
        snapshot.close()


def begun(slices: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same slices, the first of them already taken: a generator that was never begun never tidies up."""
    try:
        return chain((next(slices),), slices)
    except StopIteration:
        return iter(())


def _asked_for(stream: LiveStream, target: Target) -> SnapshotRef:
    ref = stream.durable_snapshot
    if ref is None or offset_of(ref) != target.snapshot:
        raise SnapshotNotFound(f"Stream {target.name!r} has no snapshot at {target.snapshot!r}, or no longer.")
    return ref


def _state_after(stream: LiveStream, ref: SnapshotRef) -> bytes:
    if ref.index != stream.durable_index:
        return NOT_UP_TO_DATE
    return UP_TO_DATE + STREAM_CLOSED if stream.durable_closed else UP_TO_DATE


def _render_published(connection: Connection, published: Published) -> None:
    connection.reply(NO_CONTENT, NO_STORE + header("Stream-Snapshot-Offset", str(published.offset)))
