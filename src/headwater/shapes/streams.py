"""The client of the stream server for shapes: create, append to, read and delete JSON streams.

Invariant: an acknowledged append is durable, and an append that is repeated with its sequence is not applied twice.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from headwater.client import AsyncClient, ClientError, ConflictError, OffsetGoneError, Retry, StreamNotFoundError
from headwater.shapes.errors import UnavailableError

Result = TypeVar("Result")

RETRY_S: Final = 3.0
"""Long enough for a restart of the server; after this time the response is 503."""


class ShapeStreamMissingError(Exception):
    """The stream does not exist, or was deleted."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a stream: its messages, separated by commas."""

    body: bytes
    next_offset: str
    up_to_date: bool


class Streams:
    def __init__(self, url: str, token: str = "", ca_file: Path | None = None) -> None:
        self._client = AsyncClient(url, token=token or None, ca_file=ca_file, retry=Retry(timeout_s=RETRY_S))

    async def close(self) -> None:
        await self._client.close()

    async def create(self, name: str) -> None:
        """Create the stream if it does not exist."""
        await _translated(self._client.stream(name).create())

    async def append(self, name: str, messages: bytes, sequence: str) -> str:
        """Append messages (separated by commas); returns the tail. A sequence that was used before is not appended."""
        stream = self._client.stream(name, content_type="application/json")
        try:
            return (await _translated(stream.append_body(b"[" + messages + b"]", seq=sequence))).next_offset
        except ConflictError:
            # This process is the only writer, so an earlier attempt succeeded although its response was lost.
            return await self.tail(name)

    async def tail(self, name: str) -> str:
        return (await _translated(self._client.stream(name).head())).next_offset

    async def read(self, name: str, offset: str, until: str | None = None) -> Slice:
        """Read from an offset, at most up to `until`; the server may return less."""
        stream = self._client.stream(name, content_type="application/json")
        chunk = await _translated(stream.read_chunk(offset, until=until))
        return Slice(chunk.body.strip()[1:-1], chunk.next_offset, chunk.up_to_date)

    async def delete(self, name: str) -> None:
        """Delete the stream; one that does not exist is not an error."""
        await _translated(self._client.stream(name).delete(missing_ok=True))


async def _translated(work: Awaitable[Result]) -> Result:
    try:
        return await work
    except ConflictError:
        raise
    except (StreamNotFoundError, OffsetGoneError) as error:
        raise ShapeStreamMissingError(str(error)) from None
    except ClientError as error:
        raise UnavailableError(f"The stream server is unavailable: {error}") from error
