"""Buckets, and the ordered index of the streams in each.

A bucket is a document. Its index of stream ids is rebuilt from the catalog at startup and contains durable streams.
A bucket that has streams cannot be deleted, so the bucket of every stream exists. Whether a bucket is empty is
decided by the pending state: a stream whose creation is queued prevents the deletion of its bucket.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Final, Protocol, TypeAlias

import msgspec
from sortedcontainers import SortedDict, SortedList

from headwater.core.buckets import bucket_of_document, document_key, ids_of, is_bucketed, stream_name
from headwater.core.catalog import Catalog
from headwater.core.errors import BucketExists, BucketNotEmpty, BucketNotFound, Refusal
from headwater.core.records import Document
from headwater.core.rules import CreateRequest
from headwater.engine.quota import Quota, document_bytes
from headwater.engine.results import OnCreated
from headwater.engine.scheduler import Scheduler
from headwater.engine.slices import Slices
from headwater.engine.stream import LiveStream
from headwater.engine.stream_host import DocumentWriter

log = logging.getLogger("headwater.engine")

STEP_IDS: Final = 500
"""Ids of a listing that are checked in one step: about a millisecond."""
STEPS_AT_ONCE: Final = 4
"""Steps before a listing continues in slices. Only one that skips many expired streams takes more."""


class BucketConfig(msgspec.Struct, frozen=True):
    """The content of a bucket's document."""

    created_ms: int


_configs: Final = msgspec.json.Decoder(BucketConfig)


class BucketState:
    """One bucket: the ids of its visible streams, and the incarnations whose creation is not durable yet."""

    __slots__ = ("created_ms", "creating", "id", "ids")

    def __init__(self, bucket_id: str, created_ms: int) -> None:
        self.id = bucket_id
        self.created_ms = created_ms
        self.ids = SortedList()
        """In the order of code points, which is the order of the bytes in UTF-8."""
        self.creating: set[int] = set()


class StreamPage(msgspec.Struct, frozen=True, gc=False):
    """Some streams of a bucket, in order."""

    bucket_id: str
    prefix: str
    streams: tuple[LiveStream, ...]
    has_more: bool


class BucketPage(msgspec.Struct, frozen=True, gc=False):
    """Some buckets, in order."""

    buckets: tuple[BucketState, ...]
    has_more: bool


OnBucketPage: TypeAlias = Callable[[BucketPage | Refusal], None]
OnBucket: TypeAlias = Callable[[BucketState | Refusal], None]
OnStreamPage: TypeAlias = Callable[[StreamPage | Refusal], None]


class BucketsHost(DocumentWriter, Protocol):
    """The part of the engine that buckets use."""

    catalog: Catalog[LiveStream]
    quota: Quota

    def now_ms(self) -> int: ...

    def check_writable(self) -> None: ...

    def expire_due(self) -> None: ...

    def after_all_pending(self, done: Callable[..., None], result: object) -> None: ...

    def create(self, request: CreateRequest, done: OnCreated) -> None: ...

    def seen(self, name: str) -> LiveStream | None: ...


class BucketsElsewhere(Protocol):
    """With several workers: buckets of other workers, and their streams in buckets of this worker."""

    def owns(self, bucket_id: str) -> bool:
        """Whether the bucket belongs to this worker. Others have only streams here that were placed on this worker."""

    def has_any(self, bucket_id: str) -> bool:
        """Whether another worker has streams of a bucket, or is creating one."""

    def seen(self, name: str) -> LiveStream | None:
        """A visible stream of another worker."""


class Buckets:
    def __init__(self, engine: BucketsHost, scheduler: Scheduler) -> None:
        self._engine = engine
        self._slices = Slices(scheduler)
        self.elsewhere: BucketsElsewhere | None = None
        self._documents = engine.catalog.documents
        self._decided: dict[str, BucketState] = {}
        """Buckets by id, as they will be when all queued records are durable."""
        self._durable = SortedDict()
        """Durable buckets, by id."""
        self._creating: deque[BucketState] = deque()
        """Buckets whose creation is queued, in that order."""

    def start(self) -> None:
        """Rebuild the indexes from the catalog. A bucket that has streams but no document is restored."""
        for key, value in self._documents.items():
            bucket_id = bucket_of_document(key)
            if bucket_id is not None:
                self._decided[bucket_id] = BucketState(bucket_id, _created_ms(bucket_id, value))
        streams: dict[str, list[LiveStream]] = {bucket_id: [] for bucket_id in self._decided}
        for stream in self._engine.catalog:
            if is_bucketed(stream.name) and not stream.deleted and self._owns(ids_of(stream.name)[0]):
                streams.setdefault(ids_of(stream.name)[0], []).append(stream)
        for bucket_id, found in streams.items():
            bucket = self._decided.get(bucket_id) or self._restore(bucket_id, found)
            bucket.ids = SortedList(ids_of(stream.name)[1] for stream in found)
        self._durable = SortedDict(self._decided)

    def _restore(self, bucket_id: str, streams: list[LiveStream]) -> BucketState:
        """Create a missing bucket, so that its streams can be read and deleted."""
        log.warning("bucket %r is missing but has %d streams; it is created again", bucket_id, len(streams))
        bucket = self._decided[bucket_id] = BucketState(bucket_id, min(stream.created_ms for stream in streams))
        value = msgspec.json.encode(BucketConfig(bucket.created_ms))
        self._creating.append(bucket)
        try:
            self._engine.put_document(document_key(bucket_id), value, None, None)
        except Refusal as refusal:
            self._creating.pop()
            log.warning(
                "bucket %r is restored in memory only, because it could not be stored: %s", bucket_id, refusal.detail
            )
        return bucket

    def create(self, bucket_id: str, done: OnBucket) -> None:
        if bucket_id in self._decided:
            refusal = BucketExists(f"Bucket {bucket_id!r} exists already; use it, or choose another id.")
            self._engine.after_all_pending(done, refusal)
            return
        self._engine.check_writable()
        bucket = BucketState(bucket_id, self._engine.now_ms())
        value = msgspec.json.encode(BucketConfig(bucket.created_ms))
        self._engine.quota.check(0, document_bytes(document_key(bucket_id), value))
        self._decided[bucket_id] = bucket
        self._creating.append(bucket)
        self._engine.put_document(document_key(bucket_id), value, done, bucket)

    def delete(self, bucket_id: str, done: OnBucket) -> None:
        self._engine.expire_due()
        bucket = self._decided.get(bucket_id)
        if bucket is None:
            self._engine.after_all_pending(done, bucket_not_found(bucket_id))
            return
        creating = any(not self._is_deleted(incarnation) for incarnation in bucket.creating)
        elsewhere = self.elsewhere is not None and self.elsewhere.has_any(bucket_id)
        if creating or elsewhere or any(self._is_kept(bucket_id, stream_id) for stream_id in bucket.ids):
            refusal = BucketNotEmpty(f"Bucket {bucket_id!r} still has streams; delete them first.")
            self._engine.after_all_pending(done, refusal)
            return
        self._engine.check_writable()
        del self._decided[bucket_id]
        self._engine.put_document(document_key(bucket_id), None, done, bucket)

    def look_up(self, bucket_id: str, done: OnBucket) -> None:
        """The bucket as it will be when all queued records are durable."""
        self._engine.expire_due()
        self._engine.after_all_pending(partial(self._found, bucket_id, done), None)

    def all(self, after: str | None, limit: int, done: OnBucketPage) -> None:
        """The first `limit` buckets whose ids come after `after`."""

        def found(result: Refusal | None) -> None:
            if result is not None:
                done(result)
                return
            ids = tuple(islice(self._durable.irange(after, inclusive=(False, True)), limit + 1))
            done(BucketPage(tuple(self._durable[bucket_id] for bucket_id in ids[:limit]), len(ids) > limit))

        self._engine.expire_due()
        self._engine.after_all_pending(found, None)

    def page(self, bucket_id: str, prefix: str, after: str | None, limit: int, done: OnStreamPage) -> None:
        """The first `limit` streams of a bucket with a prefix, whose ids come after `after`."""

        def found(bucket: BucketState | Refusal) -> None:
            if isinstance(bucket, Refusal):
                done(bucket)
                return
            now_ms = self._engine.now_ms()

            def alive(stream_id: str) -> LiveStream | None:
                stream = self._seen(stream_name(bucket_id, stream_id))
                return stream if stream is not None and not stream.expired(now_ms) else None

            def complete(streams: tuple[LiveStream, ...]) -> None:
                done(StreamPage(bucket_id, prefix, streams[:limit], len(streams) > limit))

            find_streams(bucket.ids, prefix, after, limit + 1, alive, self._slices, complete)

        self.look_up(bucket_id, found)

    def exists(self, bucket_id: str) -> bool:
        """Whether the bucket exists for writers, even if its creation is not durable yet. A bucket of another worker
        counts as existing, because its owner has checked it."""
        return bucket_id in self._decided or not self._owns(bucket_id)

    def create_stream(self, bucket_id: str, request: CreateRequest, done: OnCreated) -> None:
        """Create a stream in an existing bucket; does not create the bucket (extensions §1.2)."""
        bucket = self._decided.get(bucket_id)
        self._engine.create(request, done)
        stream = self._engine.catalog.by_name.get(request.name)
        if bucket is not None and stream is not None and not stream.visible:
            bucket.creating.add(stream.id)

    # -- durable records -------------------------------------------------------------------------------------------

    def document_stored(self, record: Document) -> None:
        bucket_id = bucket_of_document(record.key)
        if bucket_id is None:
            return
        if record.value is None:
            del self._durable[bucket_id]
        else:
            bucket = self._creating.popleft()
            assert bucket.id == bucket_id, "buckets become durable in the order in which they were decided"
            self._durable[bucket_id] = bucket

    def stream_created(self, stream: LiveStream) -> None:
        """Add a stream of this worker or of another one."""
        if is_bucketed(stream.name):
            bucket_id, stream_id = ids_of(stream.name)
            if not self._owns(bucket_id):
                return
            bucket = self._durable[bucket_id]
            bucket.creating.discard(stream.id)
            if stream_id not in bucket.ids:
                bucket.ids.add(stream_id)

    def stream_ended(self, stream: LiveStream) -> None:
        if is_bucketed(stream.name):
            bucket_id, stream_id = ids_of(stream.name)
            if self._owns(bucket_id):
                self._durable[bucket_id].ids.discard(stream_id)

    # -- implementation --------------------------------------------------------------------------------------------

    def _owns(self, bucket_id: str) -> bool:
        return self.elsewhere is None or self.elsewhere.owns(bucket_id)

    def _seen(self, name: str) -> LiveStream | None:
        found = self._engine.seen(name)
        return self.elsewhere.seen(name) if found is None and self.elsewhere is not None else found

    def _is_kept(self, bucket_id: str, stream_id: str) -> bool:
        """Whether a visible stream will still exist when all queued records are durable."""
        stream = self._engine.catalog.by_name.get(stream_name(bucket_id, stream_id))
        return stream is not None and not stream.deleted

    def _is_deleted(self, incarnation: int) -> bool:
        """Whether a stream will be deleted when all queued records are durable."""
        stream = self._engine.catalog.by_id.get(incarnation)
        return stream is None or stream.deleted

    def _found(self, bucket_id: str, done: OnBucket, result: Refusal | None) -> None:
        if result is not None:
            done(result)
        elif bucket_id not in self._durable:
            done(bucket_not_found(bucket_id))
        else:
            done(self._durable[bucket_id])


def find_streams(
    ids: SortedList,
    prefix: str,
    after: str | None,
    limit: int,
    alive: Callable[[str], LiveStream | None],
    slices: Slices,
    done: Callable[[tuple[LiveStream, ...]], None],
) -> None:
    """Call `done` with the first `limit` streams that are `alive`, now or after many others were skipped in slices.

    After a clock jump, a bucket can have any number of expired streams whose data is kept.
    """
    found: list[LiveStream] = []
    steps = _finding(ids, prefix, after, limit, alive, found)

    def finish(error: Exception | None) -> None:
        assert error is None, "streams are only looked up"
        done(tuple(found))

    if sum(1 for _ in islice(steps, STEPS_AT_ONCE)) < STEPS_AT_ONCE:
        finish(None)
    else:
        slices.add(steps, finish)


def _finding(
    ids: SortedList,
    prefix: str,
    after: str | None,
    limit: int,
    alive: Callable[[str], LiveStream | None],
    found: list[LiveStream],
) -> Iterator[None]:
    """Add streams to `found`. The ids may change between two steps."""
    while True:
        for checked, stream_id in enumerate(ids_from(ids, prefix, after), 1):
            after = stream_id
            stream = alive(stream_id)
            if stream is not None:
                found.append(stream)
                if len(found) == limit:
                    return
            if checked == STEP_IDS:
                break
        else:
            return
        yield


def ids_from(ids: SortedList, prefix: str, after: str | None) -> Iterator[str]:
    """The ids with a prefix, in order, from the first one after `after`. The list must not change."""
    start = prefix if after is None else max(prefix, after)
    for stream_id in ids.irange(start, inclusive=(start != after, True)):
        if not stream_id.startswith(prefix):
            return
        yield stream_id


def _created_ms(bucket_id: str, document: bytes) -> int:
    try:
        return _configs.decode(document).created_ms
    except msgspec.MsgspecError as error:
        log.error("the document of bucket %r cannot be read; its creation time is lost: %s", bucket_id, error)
        return 0


def bucket_not_found(bucket_id: str) -> BucketNotFound:
    return BucketNotFound(f"There is no bucket {bucket_id!r}; create it with PUT /ds/{bucket_id}.")
