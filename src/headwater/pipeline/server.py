"""What jobs ask of the stream server beside reading and appending: that their streams exist."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.pipeline.job import Surroundings
from headwater.spark.errors import ServerRefused, StreamMissing
from headwater.spark.protocol import Client, connect

JSON = "application/json"


def client(surroundings: Surroundings, retry_timeout_s: float = 120.0) -> Client:
    return connect(surroundings.connection(retry_timeout_s=retry_timeout_s))


def create_streams(surroundings: Surroundings, names: Iterable[str]) -> None:
    """JSON streams of these names; those that are there already, of whatever type, stay as they are."""
    asked = client(surroundings)
    for name in names:
        try:
            asked.head(name)
        except StreamMissing:
            try:
                asked.create(name, JSON)
            except ServerRefused as refused:
                if refused.status != 409:
                    raise
