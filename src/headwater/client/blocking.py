"""The synchronous face: `Client`, `Stream` and `Bucket`. Each method runs one operation and blocks until it is done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from headwater.client import listing, reading, state
from headwater.client.effects import Emit, Open, Operation, Policy, Receive, Request, Sleep
from headwater.client.errors import ClientError, InvalidRequestError
from headwater.client.http1 import Body, Response, split_url
from headwater.client.multipart import PartEnd, PartStart
from headwater.client.operations import JSON, Message, StreamOperations
from headwater.client.results import (
    BEGINNING,
    AppendResult,
    Batch,
    BootstrapInfo,
    BucketEntry,
    Chunk,
    CreateResult,
    ProducerStamp,
    Range,
    Snapshot,
    StreamEntry,
    StreamInfo,
)
from headwater.client.retry import Retry
from headwater.client.settings import ClientSettings, HeaderValue, Token
from headwater.client.sync_transport import Connection, SyncTransport

T = TypeVar("T")


class Client:
    """A server, and the connections to it. Threads may share a client.

    `base_url` is the address of the server, such as `http://localhost:4437`. Close the client, or use it in a `with`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: Token = None,
        headers: Mapping[str, HeaderValue] | None = None,
        timeout_s: float = 30.0,
        connect_timeout_s: float = 10.0,
        ca_file: str | Path | None = None,
        retry: Retry | None = None,
        policy: Policy | None = None,
    ) -> None:
        split_url(base_url)
        self.base_url = base_url.rstrip("/")
        self.policy = policy or Policy(retry or Retry())
        settings = ClientSettings(headers or {}, token, timeout_s, connect_timeout_s, ca_file, self.policy)
        self._timeout_s = timeout_s
        self._headers = settings.fixed_headers()
        self._callables = settings.header_callables()
        self.transport = SyncTransport(settings.tls(), connect_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections. The client may be used again."""
        self.transport.close()

    def stream(self, name: str, *, content_type: str | None = None) -> Stream:
        """A stream by its name, its path (`/ds/bucket/stream`) or its URL. No request is sent."""
        return Stream(listing.stream_url(self.base_url, name), client=self, content_type=content_type)

    def streams(self, prefix: str = "") -> list[StreamEntry]:
        """The streams that the server's registry reports. Servers without one: `StreamNotFoundError`."""
        return self.run(listing.registered_streams(self.policy, f"{self.base_url}/v1/stream", prefix))

    def bucket(self, bucket_id: str) -> Bucket:
        """A bucket by its id. No request is sent."""
        return Bucket(listing.stream_url(self.base_url, f"/ds/{bucket_id}"), client=self)

    def buckets(self) -> Iterator[BucketEntry]:
        return self.iterate(listing.buckets(self.policy, self.base_url))

    # -- running operations ------------------------------------------------------------------------------------------

    def request_headers(self, request: Request) -> dict[str, str]:
        """The headers of the client and of the request, with tokens as they are now."""
        headers = {**self._headers, **request.headers}
        for name, (callable_, before) in self._callables.items():
            value = callable_()
            if not isinstance(value, str):
                raise InvalidRequestError(f"header {name!r}: its callable must return text; is this an async callable?")
            headers[name] = before + value
        return headers

    def run(self, operation: Operation[T]) -> T:
        """The result of an operation that emits nothing."""
        for _ in (driving := _Driving(self, operation)):
            raise AssertionError("the operation emits values; iterate over it")
        return driving.result  # type: ignore[no-any-return]

    def iterate(self, operation: Operation[Any]) -> Iterator[Any]:
        """The values that an operation emits. Leaving the loop ends the operation."""
        return iter(_Driving(self, operation))

    def send(self, request: Request) -> Response:
        timeout_s = self._timeout_s if request.timeout_s is None else request.timeout_s
        return self.transport.send(request, self.request_headers(request), timeout_s)

    def open(self, request: Request) -> tuple[Connection, Response]:
        """Send a request and return as soon as the head of the response has arrived."""
        timeout_s = self._timeout_s if request.timeout_s is None else request.timeout_s
        headers = self.request_headers(request)
        connection = self.transport.take(split_url(request.url)[0])
        try:
            connection.send(request, headers, timeout_s)
            return connection, connection.response(whole=False)
        except BaseException:
            connection.close()
            raise


class _Driving:
    """Performs the effects of one operation by blocking."""

    def __init__(self, client: Client, operation: Operation[Any]) -> None:
        self._client = client
        self._operation = operation
        self.result: Any = None

    def __iter__(self) -> Iterator[Any]:
        operation, client = self._operation, self._client
        opened: Connection | None = None
        try:
            effect = next(operation)
            while True:
                result: Any = None
                try:
                    match effect:
                        case Request():
                            result = client.send(effect)
                        case Emit():
                            yield effect.value
                        case Receive():
                            assert opened is not None
                            result = opened.more(effect.response)
                            if not result:
                                client.transport.give_back(opened, effect.response)
                                opened = None
                        case Open():
                            if opened is not None:
                                opened.close()
                                opened = None
                            opened, result = client.open(effect.request)
                        case Sleep():
                            time.sleep(effect.seconds)
                except ClientError as error:
                    effect = operation.throw(error)
                else:
                    effect = operation.send(result)
        except StopIteration as stop:
            self.result = stop.value
        finally:
            if opened is not None:
                opened.close()
            operation.close()


class Reader:
    """Iterates over the messages of a stream: JSON values, text, or bytes, by the content type of the stream.

    `offset` is where a later reader continues. It moves when the last message of a batch has been handed out, so a
    program that stores it after each message reads some messages again after a crash, and misses none.
    """

    def __init__(self, client: Client, operations: StreamOperations, start: str, live: reading.Live | None) -> None:
        self._client = client
        self._at = at = reading.Position(start)
        self.offset = start
        self.up_to_date = False
        """Whether everything that the stream held has been handed out."""
        self.closed = False
        """Whether the stream is closed and its last message has been handed out."""
        if live is None:
            operation: Operation[Any] = reading.read(operations, at, lambda batch: batch)
        else:
            operation = reading.follow(operations, at, live, lambda batch: batch)
        self._batches: Iterator[Batch] = client.iterate(operation)
        self._values = self._iterate()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the reading; its connection is closed."""
        self._values.close()
        self._batches.close()  # type: ignore[attr-defined]

    def batches(self) -> Iterator[Batch]:
        """The same messages in the batches in which they arrive, empty ones included."""
        for batch in self._batches:
            self._moved(batch)
            yield batch

    def _iterate(self) -> Any:
        decode = reading.Values().of
        for batch in self._batches:
            values = decode(batch)
            if values:
                yield from values[:-1]
                self._moved(batch)
                yield values[-1]
            else:
                self._moved(batch)

    def _moved(self, batch: Batch) -> None:
        self.offset, self.up_to_date, self.closed = batch.next_offset, batch.up_to_date, batch.closed


class Part:
    """One part of a bootstrap. Its body can be read once, before the next part."""

    def __init__(self, content_type: str, chunks: Iterator[bytes]) -> None:
        self.content_type = content_type
        self._chunks = chunks

    def chunks(self) -> Iterator[bytes]:
        return self._chunks

    def read(self) -> bytes:
        return b"".join(self._chunks)


class Bootstrap:
    """The response to a bootstrap. `parts` yields the snapshot, then the messages after it, once."""

    def __init__(self, info: BootstrapInfo, parts: Iterator[Part]) -> None:
        self.info = info
        self.parts = parts


class Stream:
    """One stream, by its URL. Without a `client` it has one of its own: close the stream, or use it in a `with`."""

    def __init__(
        self, url: str, *, client: Client | None = None, content_type: str | None = None, **options: Any
    ) -> None:
        """`options` are those of `Client`: `token`, `headers`, `timeout_s`, `ca_file`, `retry`."""
        if client is not None and options:
            raise TypeError("options belong to the client; pass one or the other")
        self._owns_client = client is None
        self.client = Client(str(split_url(url)[0]), **options) if client is None else client
        self._operations = StreamOperations(url, self.client.policy, content_type)
        self.url = self._operations.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connections, unless the client was given."""
        if self._owns_client:
            self.client.close()

    # -- the stream itself -------------------------------------------------------------------------------------------

    def create(
        self,
        content_type: str = JSON,
        *,
        ttl_s: int | None = None,
        expires_at: datetime | str | None = None,
        closed: bool = False,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> CreateResult:
        """Create the stream, or confirm that it exists with the same configuration."""
        return self.client.run(
            self._operations.create(
                content_type, ttl_s=ttl_s, expires_at=expires_at, closed=closed, body=body, headers=headers
            )
        )

    def fork(
        self,
        name: str,
        *,
        offset: str | None = None,
        sub_offset: int | None = None,
        ttl_s: int | None = None,
        expires_at: datetime | str | None = None,
    ) -> Stream:
        """Create a stream that starts with the data of this one, up to `offset` or to its end."""
        fork = self.client.stream(name)
        fork.fork_from(self, offset=offset, sub_offset=sub_offset, ttl_s=ttl_s, expires_at=expires_at)
        return fork

    def fork_from(
        self,
        source: Stream,
        *,
        offset: str | None = None,
        sub_offset: int | None = None,
        ttl_s: int | None = None,
        expires_at: datetime | str | None = None,
    ) -> CreateResult:
        """Create this stream as a fork of another one of the same server."""
        return self.client.run(
            self._operations.fork_from(
                source.url, offset=offset, sub_offset=sub_offset, ttl_s=ttl_s, expires_at=expires_at
            )
        )

    def head(self) -> StreamInfo:
        return self.client.run(self._operations.head())

    def close(self) -> AppendResult:
        """Close the stream: nothing more can be appended, and readers learn that they have seen the end."""
        return self.client.run(self._operations.close())

    def delete(self, *, missing_ok: bool = False) -> None:
        self.client.run(self._operations.delete(missing_ok=missing_ok))

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(
        self,
        message: Message,
        *,
        close: bool = False,
        seq: str | None = None,
        producer: ProducerStamp | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AppendResult:
        """Append one message: any JSON value to a JSON stream (bytes are JSON text), text or bytes to others.

        Without a producer it is sent once, and again only if the server did not process it.
        """
        return self.client.run(
            self._operations.append(message, close=close, seq=seq, producer=producer, headers=headers)
        )

    def append_many(
        self,
        messages: Iterable[Message],
        *,
        close: bool = False,
        seq: str | None = None,
        producer: ProducerStamp | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AppendResult:
        """Append several messages in one request: all of them, or none."""
        return self.client.run(
            self._operations.append_many(messages, close=close, seq=seq, producer=producer, headers=headers)
        )

    def append_body(
        self,
        body: bytes,
        *,
        close: bool = False,
        seq: str | None = None,
        producer: ProducerStamp | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AppendResult:
        """Append a request body as it is: on a JSON stream one message, or an array of them."""
        return self.client.run(
            self._operations.append_body(body, close=close, seq=seq, producer=producer, headers=headers)
        )

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, offset: str = BEGINNING) -> Reader:
        """Everything from an offset to the current end."""
        return Reader(self.client, self._operations, offset, None)

    def follow(self, offset: str = BEGINNING, *, live: reading.Live = "auto") -> Reader:
        """Everything from an offset on, and what is appended, until the stream is closed.

        `live` is "sse", "long-poll", or "auto": events, except for text (where events would turn carriage returns into
        line feeds) and where events do not arrive.
        """
        return Reader(self.client, self._operations, offset, live)

    def last(self, count: int = 1) -> list[Any]:
        """The last messages, decoded like those of `read`."""
        messages = self.client.run(self._operations.last(count))
        return reading.decoded(messages, self._operations.content_type or "")

    def read_chunk(self, offset: str = BEGINNING, *, until: str | None = None) -> Chunk:
        """One catch-up read: from an offset to wherever the server ends its answer, never beyond `until`."""
        return self.client.run(self._operations.read_chunk(offset, until))

    def read_frames(self, offset: str, until: str) -> Chunk:
        """One read with message boundaries (extension `frames`)."""
        return self.client.run(self._operations.read_frames(offset, until))

    def splits(self, start: str, end: str, count: int) -> list[Range]:
        """A range cut into about `count` parts of the same size (extension `splits`)."""
        return self.client.run(self._operations.splits(start, end, count))

    # -- state -------------------------------------------------------------------------------------------------------

    def snapshot(self, offset: str | None = None) -> Snapshot:
        """The latest snapshot, or the one at an offset."""
        return self.client.run(self._operations.snapshot(offset))

    def publish_snapshot(self, offset: str, body: Body, content_type: str = "application/octet-stream") -> None:
        """Publish the state that all messages before `offset` fold to. A body of any size may come in pieces."""
        self.client.run(self._operations.publish_snapshot(offset, body, content_type))

    @contextmanager
    def bootstrap(self) -> Iterator[Bootstrap]:
        """The latest snapshot and the messages after it in one response, read as it arrives."""
        events = self.client.iterate(state.bootstrap(self._operations))
        try:
            yield Bootstrap(next(events), _parts(events))
        finally:
            events.close()  # type: ignore[attr-defined]

    def follow_state(
        self, target: state.State, *, live: reading.Live = "auto", allow_missing: bool = False
    ) -> Iterator[state.StateProgress]:
        """Keep a state up to date with the stream, until it is closed; stop by leaving the loop."""
        return self.client.iterate(state.follow_state(self._operations, target, live=live, allow_missing=allow_missing))


def _parts(events: Iterator[Any]) -> Iterator[Part]:
    for event in events:
        if isinstance(event, PartStart):
            chunks = _until_end(events)
            yield Part(event.content_type, chunks)
            for _ in chunks:
                pass


def _until_end(events: Iterator[Any]) -> Iterator[bytes]:
    for event in events:
        if isinstance(event, PartEnd):
            return
        yield event


class Bucket:
    """A bucket: streams that are listed together and have snapshots."""

    def __init__(self, url: str, *, client: Client) -> None:
        self.url = url.rstrip("/")
        self.client = client

    def create(self, *, exist_ok: bool = False) -> bool:
        """Create the bucket; whether it is new."""
        return self.client.run(listing.create_bucket(self.client.policy, self.url, exist_ok=exist_ok))

    def delete(self) -> None:
        """Delete the bucket, which must be empty."""
        self.client.run(listing.delete_bucket(self.client.policy, self.url))

    def stream(self, stream_id: str, *, content_type: str | None = None) -> Stream:
        """A stream of the bucket. No request is sent."""
        return Stream(listing.bucket_stream_url(self.url, stream_id), client=self.client, content_type=content_type)

    def streams(self, prefix: str = "") -> Iterator[StreamEntry]:
        return self.client.iterate(listing.bucket_streams(self.client.policy, self.url, prefix))
