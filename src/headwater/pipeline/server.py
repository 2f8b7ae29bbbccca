"""Requests that jobs send to the stream server, other than reading and appending."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.pipeline.job import JobEnvironment
from headwater.spark.errors import ServerRefusedError, StreamMissingError
from headwater.spark.options import ConnectionOptions
from headwater.spark.protocol import StreamsClient, connect

JSON = "application/json"


def client(environment: JobEnvironment, retry_timeout_s: float = 120.0) -> StreamsClient:
    return connect(environment.connection(retry_timeout_s=retry_timeout_s))


def create_streams(connection: ConnectionOptions, names: Iterable[str]) -> None:
    """Create the JSON streams that do not exist yet. An existing stream, of whatever type, is left as it is."""
    requests = connect(connection)
    for name in names:
        try:
            requests.head(name)
        except StreamMissingError:
            try:
                requests.create(name, JSON)
            except ServerRefusedError as refused:
                if refused.status != 409:
                    raise
