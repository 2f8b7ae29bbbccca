"""Headwater: a Durable Streams server, and a client for any Durable Streams server.

Importing this package is cheap: the names below are loaded on first use.

    from headwater import AsyncStream, Stream, StreamNotFoundError
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.client import (
        ENDLESS_RETRY,
        NO_RETRY,
        AsyncBucket,
        AsyncClient,
        AsyncProducer,
        AsyncStream,
        Bucket,
        ClaimLostError,
        Client,
        ClientError,
        ConflictError,
        ConnectError,
        ConnectionLostError,
        ForbiddenError,
        InvalidRequestError,
        LeaseLostError,
        MalformedResponseError,
        OffsetGoneError,
        PayloadTooLargeError,
        Producer,
        ProducerFencedError,
        ProducerGapError,
        RequestTimeoutError,
        Retry,
        ServerError,
        Stream,
        StreamClosedError,
        StreamNotFoundError,
        StreamRecreatedError,
        UnauthorizedError,
    )
    from headwater.server import Server

__version__ = "0.1.0"

__all__ = [
    "ENDLESS_RETRY",
    "NO_RETRY",
    "AsyncBucket",
    "AsyncClient",
    "AsyncProducer",
    "AsyncStream",
    "Bucket",
    "ClaimLostError",
    "Client",
    "ClientError",
    "ConflictError",
    "ConnectError",
    "ConnectionLostError",
    "ForbiddenError",
    "InvalidRequestError",
    "LeaseLostError",
    "MalformedResponseError",
    "OffsetGoneError",
    "PayloadTooLargeError",
    "Producer",
    "ProducerFencedError",
    "ProducerGapError",
    "RequestTimeoutError",
    "Retry",
    "Server",
    "ServerError",
    "Stream",
    "StreamClosedError",
    "StreamNotFoundError",
    "StreamRecreatedError",
    "UnauthorizedError",
    "__version__",
]

_MODULES = {name: "headwater.client" for name in __all__ if name != "__version__"} | {"Server": "headwater.server"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
