"""The protocol client: streams, producers and readers, synchronous and asynchronous, for any Durable Streams server.

    from headwater import Stream

    with Stream("http://localhost:4437/v1/stream/chat") as stream:
        stream.create()
        stream.append({"text": "hello"})
        for message in stream.follow():
            print(message)

Every operation is written once, without I/O (`operations`, `reading`, `state`, `listing`), and performed by one of two
drivers: `blocking` over sockets, `asynchronous` over asyncio. It shares no code with the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwater.client.blocking import Bootstrap, Bucket, Client, Part, Reader, Stream
from headwater.client.effects import Policy
from headwater.client.errors import (
    ClaimLostError,
    ClientError,
    ConflictError,
    ConnectError,
    ConnectionLostError,
    ForbiddenError,
    HistoryMissingError,
    InvalidRequestError,
    LeaseLostError,
    LeaseNotFoundError,
    LeaseUnsupportedError,
    MalformedResponseError,
    OffsetGoneError,
    PayloadTooLargeError,
    ProducerFencedError,
    ProducerGapError,
    RequestTimeoutError,
    ResponseError,
    ServerError,
    SseUnavailableError,
    StreamClosedError,
    StreamNotFoundError,
    StreamRecreatedError,
    TransportError,
    UnauthorizedError,
)
from headwater.client.leases import Lease
from headwater.client.many import StreamBatch
from headwater.client.results import (
    BEGINNING,
    NOW,
    AppendResult,
    Batch,
    BucketEntry,
    Chunk,
    CreateResult,
    ProducerStamp,
    Range,
    Snapshot,
    StreamEntry,
    StreamInfo,
    TimedMessage,
    digest_of,
)
from headwater.client.retry import ENDLESS_RETRY, NO_RETRY, Retry
from headwater.client.state import State, StateProgress
from headwater.client.sync_producer import Producer

if TYPE_CHECKING:
    from headwater.client.async_producer import AsyncProducer
    from headwater.client.asynchronous import (
        AsyncBootstrap,
        AsyncBucket,
        AsyncClient,
        AsyncPart,
        AsyncReader,
        AsyncStream,
    )

_ASYNCHRONOUS = frozenset(
    ("AsyncBootstrap", "AsyncBucket", "AsyncClient", "AsyncPart", "AsyncProducer", "AsyncReader", "AsyncStream")
)


def __getattr__(name: str) -> Any:
    """Load the asynchronous API on first use, so that programs without an event loop do not import asyncio."""
    if name not in _ASYNCHRONOUS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headwater.client import asynchronous  # noqa: PLC0415

    return getattr(asynchronous, name)


__all__ = [
    "BEGINNING",
    "ENDLESS_RETRY",
    "NOW",
    "NO_RETRY",
    "AppendResult",
    "AsyncBootstrap",
    "AsyncBucket",
    "AsyncClient",
    "AsyncPart",
    "AsyncProducer",
    "AsyncReader",
    "AsyncStream",
    "Batch",
    "Bootstrap",
    "Bucket",
    "BucketEntry",
    "Chunk",
    "ClaimLostError",
    "Client",
    "ClientError",
    "ConflictError",
    "ConnectError",
    "ConnectionLostError",
    "CreateResult",
    "ForbiddenError",
    "HistoryMissingError",
    "InvalidRequestError",
    "Lease",
    "LeaseLostError",
    "LeaseNotFoundError",
    "LeaseUnsupportedError",
    "MalformedResponseError",
    "OffsetGoneError",
    "Part",
    "PayloadTooLargeError",
    "Policy",
    "Producer",
    "ProducerFencedError",
    "ProducerGapError",
    "ProducerStamp",
    "Range",
    "Reader",
    "RequestTimeoutError",
    "ResponseError",
    "Retry",
    "ServerError",
    "Snapshot",
    "SseUnavailableError",
    "State",
    "StateProgress",
    "Stream",
    "StreamBatch",
    "StreamClosedError",
    "StreamEntry",
    "StreamInfo",
    "StreamNotFoundError",
    "StreamRecreatedError",
    "TimedMessage",
    "TransportError",
    "UnauthorizedError",
    "digest_of",
]
