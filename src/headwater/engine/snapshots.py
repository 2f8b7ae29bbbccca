"""Snapshots: publish an uploaded blob as the latest snapshot of a stream, and delete the previous one.

The blob is durable before the record that refers to it is queued, and deleted only after no durable record refers to it
any more. A fork begins with its source's snapshot, so references to blobs are counted: a blob is deleted with its last
reference. Blobs left over by a crash are removed at the next start.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import msgspec

from headwater.core.catalog import Catalog
from headwater.core.errors import Refusal, StreamNotFound
from headwater.core.offsets import BEGINNING, Offset
from headwater.core.records import Create, Retain, SnapshotRef
from headwater.core.rules import off_boundary
from headwater.core.snapshots import check_snapshot_offset
from headwater.engine.background_threads import Background
from headwater.engine.checked_storage import CheckedBlob, CheckedBlobs
from headwater.engine.cold_reads import ColdRead, pending
from headwater.engine.reading import StreamReader, gone_before
from headwater.engine.stream import LiveStream
from headwater.engine.uploads import BlobUpload
from headwater.storage.blobs import PAGE_BYTES, BlobStore

log = logging.getLogger("headwater.engine")


class Published(msgspec.Struct, frozen=True, gc=False):
    stream_id: int
    offset: Offset


class OpenSnapshot:
    """An open snapshot, which can be read to its end even if another one is published. It must be closed."""

    __slots__ = ("_blob", "ref")

    def __init__(self, ref: SnapshotRef, blob: CheckedBlob) -> None:
        self.ref = ref
        self._blob = blob

    def pages(self, *, waits: bool = False) -> Iterator[bytes]:
        """Its bytes, in pages. A reader that `waits` gets a `Pending` while a page is being fetched."""
        for start in range(0, self.ref.size, PAGE_BYTES):
            while isinstance(page := self._page(start), ColdRead):
                if not waits:
                    raise page
                yield pending(page)
            yield page

    def _page(self, start: int) -> bytes | ColdRead:
        try:
            return self._blob.read(start, min(start + PAGE_BYTES, self.ref.size))
        except ColdRead as miss:
            return miss

    def close(self) -> None:
        self._blob.close()


OnPublished: TypeAlias = Callable[[Published | Refusal], None]


class SnapshotsHost(Protocol):
    """The part of the engine that snapshots use."""

    catalog: Catalog[LiveStream]
    reader: StreamReader

    def now_ms(self) -> int: ...

    def look_up(self, name: str) -> LiveStream: ...

    def check_writable(self) -> None: ...

    def claim_bytes(self, size: int) -> None: ...

    def release_bytes(self, size: int) -> None: ...

    def retain(self, stream: LiveStream, record: Retain, done: Callable[..., None] | None, result: object) -> None: ...


class Snapshots:
    def __init__(self, engine: SnapshotsHost, blobs: BlobStore, background: Background, max_bytes: int) -> None:
        self._engine = engine
        self._blobs = blobs
        self._checked = CheckedBlobs(blobs)
        self._background = background
        self._snapshots: dict[int, SnapshotRef] = {}
        """The durable snapshot of each stream."""
        self._references: dict[int, int] = {}
        """The number of streams that refer to each blob."""
        self.max_bytes = max_bytes

    def start(self) -> None:
        """Count the references of streams to blobs, and remove blobs without one."""
        for stream in self._engine.catalog:
            if stream.snapshot is not None and not stream.deleted:
                self._add_reference(stream.id, stream.snapshot)
        self._engine.claim_bytes(sum({ref.blob_id: ref.size for ref in self._snapshots.values()}.values()))
        found = self._blobs.ids()
        for blob_id in found - self._references.keys():
            self._blobs.delete(blob_id)
        for stream_id, ref in self._snapshots.items():
            if ref.blob_id not in found:
                name = self._engine.catalog.by_id[stream_id].name
                log.error("the snapshot of stream %r (blob %016x) is missing", name, ref.blob_id)

    def check(self, name: str, token: str) -> tuple[LiveStream, Offset]:
        """Check where a snapshot is published; returns the stream and the offset, or raises the refusal."""
        stream = self._engine.look_up(name)
        tail = Offset(stream.durable_index, stream.durable_position)
        if token == BEGINNING and stream.retained_index:
            raise gone_before(stream)
        offset = self._engine.reader.parse_offset(stream, token)
        # Compare with the pending retained offset, not the durable one: a later record must never move it back.
        check_snapshot_offset(stream.id, offset, stream.retained, tail)
        if self._engine.reader.boundary(stream, offset.message_index) != offset.byte_position:
            raise off_boundary(token)
        return stream, offset

    def upload(self) -> BlobUpload:
        """Start an upload of a snapshot."""
        self._engine.check_writable()
        return BlobUpload(
            self._blobs,
            self._background,
            secrets.randbits(63),
            self.max_bytes,
            self._engine.claim_bytes,
            self._engine.release_bytes,
        )

    def publish(self, name: str, token: str, content_type: str, upload: BlobUpload, done: OnPublished) -> None:
        """Publish the upload as the latest snapshot of the stream, or abort it."""
        try:
            stream, _ = self.check(name, token)
            if upload.stream_id is not None and upload.stream_id != stream.id:
                raise StreamNotFound(
                    f"Stream {name!r} was created again during the upload; make a snapshot of the new stream."
                )
            self._engine.check_writable()
        except Refusal as refusal:
            upload.abort()
            done(refusal)
            return
        upload.stream_id = stream.id

        def written(failure: Refusal | None) -> None:
            if failure is not None:
                done(failure)
                return
            try:
                self._commit(name, token, content_type, upload, done)
            except Refusal as refusal:
                self._delete_blob(upload.blob_id, upload.size)
                done(refusal)

        upload.finish(written)

    def open(self, stream: LiveStream) -> OpenSnapshot | None:
        """The latest visible snapshot, if there is one."""
        ref = stream.durable_snapshot
        if ref is None:
            return None
        return OpenSnapshot(ref, self._checked.open(ref, stream.name))

    def _commit(self, name: str, token: str, content_type: str, upload: BlobUpload, done: OnPublished) -> None:
        """Check everything again, because the stream may have changed while the blob was written, and commit."""
        stream, offset = self.check(name, token)
        if stream.id != upload.stream_id or stream.id not in self._engine.catalog.by_id:
            raise StreamNotFound(f"Stream {name!r} was deleted during the upload; the snapshot was not stored.")
        now_ms = self._engine.now_ms()
        ref = SnapshotRef(offset.message_index, offset.byte_position, content_type, upload.blob_id, upload.size, now_ms)
        self._engine.retain(
            stream,
            Retain(stream.id, now_ms, offset.message_index, offset.byte_position, ref),
            done,
            Published(stream.id, offset),
        )

    # -- durable records -------------------------------------------------------------------------------------------

    def inherited(self, record: Create) -> None:
        if record.snapshot is not None:
            self._add_reference(record.id, record.snapshot)

    def retained(self, record: Retain) -> None:
        held = self._snapshots.get(record.id)
        if record.snapshot is not None:
            self._add_reference(record.id, record.snapshot)
        elif held is not None and held.message_index < record.message_index:
            del self._snapshots[record.id]
        else:
            return
        if held is not None:
            self._remove_reference(held)

    def ended(self, stream_id: int) -> None:
        held = self._snapshots.pop(stream_id, None)
        if held is not None:
            self._remove_reference(held)

    def _add_reference(self, stream_id: int, ref: SnapshotRef) -> None:
        self._snapshots[stream_id] = ref
        self._references[ref.blob_id] = self._references.get(ref.blob_id, 0) + 1

    def _remove_reference(self, ref: SnapshotRef) -> None:
        self._references[ref.blob_id] -= 1
        if not self._references[ref.blob_id]:
            del self._references[ref.blob_id]
            self._delete_blob(ref.blob_id, ref.size)

    def _delete_blob(self, blob_id: int, size: int) -> None:
        self._engine.release_bytes(size)
        if self._blobs.blocks:
            self._background.run(lambda: self._blobs.delete(blob_id), _log_failure)
        else:
            self._blobs.delete(blob_id)


def _log_failure(error: BaseException | None) -> None:
    if error is not None:
        log.warning("a replaced snapshot could not be removed; the next start will remove it: %s", error)
