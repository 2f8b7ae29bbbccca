"""The interface of subscriptions, leases and the registry to streams: of one engine, or of all engines of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from headwater.core.offsets import Offset
from headwater.core.producers import ProducerHeaders
from headwater.core.rules import CreateRequest
from headwater.engine.metrics import Metrics
from headwater.engine.reading import ReadChunk
from headwater.engine.results import OnAppended, OnCreated, OnDeleted
from headwater.engine.stream import LiveStream, StreamFollower


class StreamCatalog(Protocol):
    """The streams and the documents of the server."""

    @property
    def by_name(self) -> Mapping[str, LiveStream]: ...

    @property
    def documents(self) -> Mapping[str, bytes]: ...

    def __iter__(self) -> Iterator[LiveStream]: ...


class StreamAnnouncer(Protocol):
    """Announces created and deleted streams."""

    on_created: list[Callable[[LiveStream], None]]
    on_deleted: list[Callable[[LiveStream], None]]


class OffsetReader(Protocol):
    """Offsets of streams, and the messages of those that are in this process."""

    def parse_offset(self, stream: LiveStream, text: str) -> Offset: ...

    def boundary(self, stream: LiveStream, message_index: int) -> int | None: ...

    def chunk(self, stream: LiveStream, start: Offset, max_bytes: int) -> ReadChunk: ...

    def buffers(self, chunk: ReadChunk) -> Sequence[bytes | memoryview]: ...


class DocumentWriter(Protocol):
    """Writes the documents of the server, which are stored beside its streams."""

    def put_document(self, key: str, value: bytes | None, done: Callable[..., None] | None, result: object) -> None: ...


class StreamAppender(Protocol):
    """Appends for the server itself, or for a client."""

    def append(
        self,
        name: str,
        content_type: str | None,
        body: bytes,
        producer: ProducerHeaders | None,
        stream_seq: str | None,
        close: bool,
        done: OnAppended,
        *,
        by_server: bool = False,
    ) -> None: ...


class StreamHost(DocumentWriter, StreamAppender, Protocol):
    server_streams: set[str]

    @property
    def metrics(self) -> Metrics: ...

    @property
    def catalog(self) -> StreamCatalog: ...

    @property
    def publisher(self) -> StreamAnnouncer: ...

    @property
    def reader(self) -> OffsetReader: ...

    def now_ms(self) -> int: ...

    def create(self, request: CreateRequest, done: OnCreated, *, by_server: bool = False) -> None: ...

    def delete(self, name: str, done: OnDeleted, *, by_server: bool = False) -> None: ...

    def follow(self, stream: LiveStream, follower: StreamFollower, *, reading: bool = True) -> None: ...

    def unfollow(self, stream: LiveStream, follower: StreamFollower) -> None: ...

    def after_all_pending(self, done: Callable[..., None], result: object) -> None: ...
