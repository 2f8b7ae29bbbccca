"""The asynchronous API: `AsyncClient`, `AsyncStream` and `AsyncBucket`, with the methods of the synchronous one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from headwater.client import leases, listing, many, reading, state
from headwater.client.async_producer import AsyncProducer
from headwater.client.async_session import AsyncSession
from headwater.client.http1 import Body, split_url
from headwater.client.multipart import PartEnd, PartStart
from headwater.client.operations import (
    JSON,
    AppendOptions,
    CreateOptions,
    ForkOptions,
    Message,
    StreamOperations,
)
from headwater.client.producing import ProducerOptions
from headwater.client.results import (
    BEGINNING,
    AppendResult,
    Batch,
    BootstrapInfo,
    BucketEntry,
    Chunk,
    CreateResult,
    Range,
    Snapshot,
    StreamEntry,
    StreamInfo,
    TimedMessage,
)
from headwater.client.settings import ClientOptions

T = TypeVar("T")


class AsyncClient(AsyncSession):
    """A server, and the connections to it. Tasks of one event loop may share a client.

    `base_url` is the address of the server, such as `http://localhost:4437`. Close the client, or use it in an
    `async with`.
    """

    def __init__(self, base_url: str, **options: Unpack[ClientOptions]) -> None:
        split_url(base_url)
        super().__init__(**options)
        self.base_url = base_url.rstrip("/")

    def stream(self, name: str, *, content_type: str | None = None) -> AsyncStream:
        """A stream by its name, its path (`/ds/bucket/stream`) or its URL. No request is sent."""
        return AsyncStream(listing.stream_url(self.base_url, name), client=self, content_type=content_type)

    async def streams(self, prefix: str = "") -> list[StreamEntry]:
        """The streams with a prefix, sorted by name, from the server's listing or its registry.

        Raises `StreamNotFoundError` if the server has neither.
        """
        return await self.run(many.all_streams(self.policy, self.base_url, prefix))

    async def registered_streams(self, prefix: str = "") -> list[StreamEntry]:
        """The streams in the registry, with creation times. Raises `StreamNotFoundError` if there is no registry."""
        return await self.run(listing.registered_streams(self.policy, f"{self.base_url}/v1/stream", prefix))

    def bucket(self, bucket_id: str) -> AsyncBucket:
        """A bucket by its id. No request is sent."""
        return AsyncBucket(listing.stream_url(self.base_url, f"/ds/{bucket_id}"), client=self)

    def buckets(self) -> AsyncIterator[BucketEntry]:
        """All buckets, sorted by id."""
        return self.iterate(listing.buckets(self.policy, self.base_url))

    def follow_many(
        self, prefix: str | None = "", *, offsets: Mapping[str, str] | None = None, start: str = "-1"
    ) -> AsyncIterator[many.StreamBatch]:
        """Follow all streams with a prefix over one connection: existing and new messages, and streams created later.

        `offsets` maps the names of streams that were read before to the offsets to continue from; with `prefix=None`
        only these are followed, until all of them are closed. `start="now"` skips the existing messages of the other
        streams. This needs an extension of Headwater.
        """
        return self.iterate(many.follow_many(self.policy, self.base_url, prefix, offsets, start))


class AsyncReader:
    """Iterates over the messages of a stream: JSON values, text, or bytes, by the content type of the stream.

    `offset` is where a later reader continues. It advances after the last message of a batch, so a program that
    stores it after each message may read some messages again after a crash, but misses none.
    """

    def __init__(
        self,
        client: AsyncClient,
        operations: StreamOperations,
        start: str,
        live: reading.Live | None,
        since: datetime | str | int | None = None,
    ) -> None:
        self.offset = start
        self.up_to_date = False
        """Whether all existing messages of the stream have been returned."""
        self.closed = False
        """Whether the stream is closed and its last message has been returned."""
        self._batches: AsyncGenerator[Batch, None] = client.iterate(reading.batches(operations, start, live, since))
        self._values = self._iterate()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._values)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop reading and close the connection."""
        await self._values.aclose()
        await self._batches.aclose()

    async def batches(self) -> AsyncIterator[Batch]:
        """Iterate over batches as they arrive, including empty ones, instead of single messages."""
        async for batch in self._batches:
            self._moved(batch)
            yield batch

    async def _iterate(self) -> AsyncGenerator[Any, None]:
        decode = reading.Values().of
        async for batch in self._batches:
            values = decode(batch)
            if values:
                for value in values[:-1]:
                    yield value
                self._moved(batch)
                yield values[-1]
            else:
                self._moved(batch)

    def _moved(self, batch: Batch) -> None:
        self.offset, self.up_to_date, self.closed = batch.next_offset, batch.up_to_date, batch.closed


class AsyncPart:
    """One part of a bootstrap. Its body can be read once, before the next part."""

    def __init__(self, content_type: str, chunks: AsyncIterator[bytes]) -> None:
        self.content_type = content_type
        self._chunks = chunks

    def chunks(self) -> AsyncIterator[bytes]:
        return self._chunks

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self._chunks])


class AsyncBootstrap:
    """The response to a bootstrap. `parts` yields the snapshot, then the messages after it, once."""

    def __init__(self, info: BootstrapInfo, parts: AsyncIterator[AsyncPart]) -> None:
        self.info = info
        self.parts = parts


class AsyncStream:
    """One stream, by its URL. Without a `client` it has its own: call `disconnect`, or use the
    stream in an `async with`.

    `options` are those of `AsyncClient`, such as `token` and `headers`.
    """

    def __init__(
        self,
        url: str,
        *,
        client: AsyncClient | None = None,
        content_type: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        if client is not None and options:
            raise TypeError("these are options of the client; pass them to it")
        self._owns_client = client is None
        self.client = AsyncClient(str(split_url(url)[0]), **options) if client is None else client
        self.operations = StreamOperations(url, self.client.policy, content_type)
        self.url = self.operations.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.disconnect()

    async def disconnect(self) -> None:
        """Close the connections, unless the client was passed in."""
        if self._owns_client:
            await self.client.close()

    # -- the stream itself -------------------------------------------------------------------------------------------

    async def create(self, content_type: str = JSON, **options: Unpack[CreateOptions]) -> CreateResult:
        """Create the stream, or confirm that it exists with the same configuration."""
        return await self.client.run(self.operations.create(content_type, **options))

    async def fork(self, name: str, **options: Unpack[ForkOptions]) -> AsyncStream:
        """Create a stream that starts with the data of this one, up to `offset` or to its end."""
        fork = self.client.stream(name)
        await fork.fork_from(self, **options)
        return fork

    async def fork_from(self, source: AsyncStream, **options: Unpack[ForkOptions]) -> CreateResult:
        """Create this stream as a fork of another stream on the same server."""
        return await self.client.run(self.operations.fork_from(source.url, **options))

    async def head(self) -> StreamInfo:
        """Return the metadata of the stream."""
        return await self.client.run(self.operations.head())

    async def close(self) -> AppendResult:
        """Close the stream permanently: nothing more can be appended, and readers are notified of the end."""
        return await self.client.run(self.operations.close())

    async def delete(self, *, missing_ok: bool = False) -> None:
        """Delete the stream and its messages."""
        await self.client.run(self.operations.delete(missing_ok=missing_ok))

    # -- appending ---------------------------------------------------------------------------------------------------

    async def append(self, message: Message, **options: Unpack[AppendOptions]) -> AppendResult:
        """Append one message: any JSON value to a JSON stream (bytes are JSON text), text or bytes to others.

        Without a producer it is sent once, and again only if the server did not process it.
        """
        return await self.client.run(self.operations.append(message, **options))

    async def append_many(self, messages: Iterable[Message], **options: Unpack[AppendOptions]) -> AppendResult:
        """Append several messages in one request: all of them, or none."""
        return await self.client.run(self.operations.append_many(messages, **options))

    async def append_body(self, body: bytes, **options: Unpack[AppendOptions]) -> AppendResult:
        """Append an encoded request body: on a JSON stream one message, or an array of messages."""
        return await self.client.run(self.operations.append_body(body, **options))

    def producer(self, producer_id: str, **options: Unpack[ProducerOptions]) -> AsyncProducer:
        """An idempotent producer: it batches, pipelines and retries appends, and stores each message once, in order.

        One instance of a producer id writes at a time: a new one claims an epoch and fences those before it.
        """
        return AsyncProducer(self.client, self.operations, producer_id, **options)

    # -- the writer lease --------------------------------------------------------------------------------------------

    async def acquire_lease(self, holder: str, **options: Unpack[leases.LeaseOptions]) -> leases.Lease:
        """Acquire the lease. If it is not renewed within `ttl_s`, the server appends `final` and closes the stream."""
        return await self.client.run(leases.acquire(self.operations, holder, **options))

    async def renew_lease(self, holder: str) -> leases.Lease:
        """Renew the lease for its full time. Stop writing on `LeaseLostError` or `StreamClosedError`."""
        return await self.client.run(leases.renew(self.operations, holder))

    async def release_lease(self, holder: str) -> None:
        """Release the lease without changing the stream. A closed stream has no lease."""
        await self.client.run(leases.release(self.operations, holder))

    async def lease(self) -> leases.Lease:
        """The holder and the remaining time of the lease. Raises `LeaseNotFoundError` if there is none."""
        return await self.client.run(leases.show(self.operations))

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, offset: str = BEGINNING, *, since: datetime | str | int | None = None) -> AsyncReader:
        """Read from an offset, or from a time (extension `since`), to the current end."""
        return AsyncReader(self.client, self.operations, offset, None, since)

    def follow(
        self,
        offset: str = BEGINNING,
        *,
        since: datetime | str | int | None = None,
        live: reading.Live = "auto",
    ) -> AsyncReader:
        """Read from an offset or a time, then wait for new messages, until the stream is closed.

        `live` is "sse", "long-poll", or "auto", which uses SSE except for text (SSE would turn carriage returns into
        line feeds) and if events do not arrive.
        """
        return AsyncReader(self.client, self.operations, offset, live, since)

    async def offset_at(self, since: datetime | str | int) -> str:
        """The offset of the first message that arrived at a time or later; the tail if there is none.

        The time is a `datetime`, RFC 3339 text, or milliseconds since 1970 (extension `since`).
        """
        return await self.client.run(self.operations.offset_at(since))

    def timed_messages(self, offset: str = BEGINNING) -> AsyncIterator[TimedMessage]:
        """The messages from an offset to the current end as bytes, each with its time (extension `times`)."""
        return self.client.iterate(self.operations.timed_messages(offset))

    async def last(self, count: int = 1) -> list[Any]:
        """The last messages, decoded like those of `read`."""
        last = await self.client.run(self.operations.last(count))
        return reading.decoded(last.messages, self.operations.content_type or "")

    async def read_chunk(self, offset: str = BEGINNING, *, until: str | None = None) -> Chunk:
        """One catch-up read: from an offset to wherever the server ends its response, never beyond `until`."""
        return await self.client.run(self.operations.read_chunk(offset, until))

    async def read_frames(self, offset: str, until: str, *, times: bool = False) -> Chunk:
        """One read with message boundaries, and arrival times if `times` (extensions `frames` and `times`)."""
        return await self.client.run(self.operations.read_frames(offset, until, times=times))

    async def splits(self, start: str, end: str, count: int) -> list[Range]:
        """Split a range into about `count` parts of the same size (extension `splits`)."""
        return await self.client.run(self.operations.splits(start, end, count))

    # -- state -------------------------------------------------------------------------------------------------------

    async def snapshot(self, offset: str | None = None) -> Snapshot:
        """The latest snapshot, or the one at an offset."""
        return await self.client.run(self.operations.snapshot(offset))

    async def publish_snapshot(self, offset: str, body: Body, content_type: str = "application/octet-stream") -> None:
        """Publish the state after all messages before `offset`. The body may be an iterable of pieces."""
        await self.client.run(self.operations.publish_snapshot(offset, body, content_type))

    @asynccontextmanager
    async def bootstrap(self) -> AsyncIterator[AsyncBootstrap]:
        """The latest snapshot and the messages after it in one response, read as it arrives."""
        events = self.client.iterate(state.bootstrap(self.operations))
        try:
            yield AsyncBootstrap(await anext(events), _parts(events))
        finally:
            await events.aclose()

    def follow_state(
        self, target: state.State, *, live: reading.Live = "auto", allow_missing: bool = False
    ) -> AsyncIterator[state.StateProgress]:
        """Keep a state up to date until the stream is closed; leave the loop to stop.

        If retention dropped messages that no snapshot covers, raises `HistoryMissingError`; with `allow_missing` the
        state starts with the remaining messages.
        """
        return self.client.iterate(state.follow_state(self.operations, target, live=live, allow_missing=allow_missing))


async def _parts(events: AsyncIterator[Any]) -> AsyncIterator[AsyncPart]:
    async for event in events:
        if isinstance(event, PartStart):
            chunks = _until_part_end(events)
            yield AsyncPart(event.content_type, chunks)
            async for _ in chunks:
                pass


async def _until_part_end(events: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for event in events:
        if isinstance(event, PartEnd):
            return
        yield event


class AsyncBucket:
    """A bucket: streams that are listed together and have snapshots."""

    def __init__(self, url: str, *, client: AsyncClient) -> None:
        self.url = url.rstrip("/")
        self.client = client

    async def create(self, *, exist_ok: bool = False) -> bool:
        """Create the bucket; return whether it is new."""
        return await self.client.run(listing.create_bucket(self.client.policy, self.url, exist_ok=exist_ok))

    async def delete(self) -> None:
        """Delete the bucket, which must be empty."""
        await self.client.run(listing.delete_bucket(self.client.policy, self.url))

    def stream(self, stream_id: str, *, content_type: str | None = None) -> AsyncStream:
        """A stream of the bucket. No request is sent."""
        return AsyncStream(
            listing.bucket_stream_url(self.url, stream_id), client=self.client, content_type=content_type
        )

    def streams(self, prefix: str = "") -> AsyncIterator[StreamEntry]:
        """The streams of the bucket, sorted by name."""
        return self.client.iterate(listing.bucket_streams(self.client.policy, self.url, prefix))
