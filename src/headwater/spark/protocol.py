"""The package's client for the driver and for tasks, with errors that name Spark options.

Invariant: only idempotent requests are sent twice. Reads, creates and closes are idempotent; appends are, because they
always have producer headers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode, urlsplit

from headwater import client as protocol_client
from headwater.client import (
    AppendResult,
    Chunk,
    ClientError,
    MalformedResponseError,
    OffsetGoneError,
    Policy,
    ProducerFencedError,
    ProducerStamp,
    Range,
    ResponseError,
    Retry,
    Stream,
    StreamClosedError,
    StreamEntry,
    StreamNotFoundError,
    StreamRecreatedError,
    digest_of,
    listing,
)
from headwater.spark.errors import (
    BatchFencedError,
    DataGoneError,
    ServerRefusedError,
    ServerUnreachableError,
    SourceRecreatedError,
    StreamMissingError,
)
from headwater.spark.offsets import split_token
from headwater.spark.options import ConnectionOptions

__all__ = ["READ_AGAIN", "Appended", "Chunk", "Head", "Producer", "Range", "StreamsClient", "connect", "digest_of"]

log = logging.getLogger("headwater.spark")

Producer = ProducerStamp
Appended = AppendResult

_BOUNDING: Final = frozenset(("until", "splits", "frames", "position"))
"""The extensions that planned ranges need."""
_PARALLEL_HEADS: Final = 8
_FIRST_DELAY_S: Final = 0.05
_MAX_DELAY_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Head:
    """The metadata of a stream, and its tail."""

    content_type: str
    offset: str
    position: int | None
    closed: bool
    extensions: frozenset[str]
    snapshot: str | None
    earliest: str | None = None
    """The first offset that is retained, if that is not the beginning of the stream."""

    @property
    def bounds_reads(self) -> bool:
        """Whether the server supports planned ranges: reads with an end, positions, message boundaries."""
        return self.extensions >= _BOUNDING


@dataclass(frozen=True, slots=True)
class HeadChanges:
    """Streams that changed after a cursor; None for the head of a deleted one."""

    heads: dict[str, Head | None]
    cursor: str
    is_reset: bool
    """The server did not know the cursor, so all streams must be listed again."""


@functools.lru_cache(maxsize=16)
def connect(connection: ConnectionOptions) -> StreamsClient:
    """The client of this process. Python workers serve many tasks, so connections are kept between tasks."""
    return StreamsClient(connection)


class StreamsClient:
    """The streams below one root, by name."""

    def __init__(self, connection: ConnectionOptions) -> None:
        self._connection = connection
        self._token = ""
        self._token_read_ns = -1
        retry = Retry(connection.retry_timeout_s, first_delay_s=_FIRST_DELAY_S, max_delay_s=_MAX_DELAY_S)
        self._client = protocol_client.Client(
            connection.root,
            token=self._current_token if connection.token_file else connection.token,
            timeout_s=connection.request_timeout_s,
            ca_file=connection.ca_file or None,
            policy=Policy(retry=retry, on_retry=_log_retry),
        )

    def disconnect(self) -> None:
        """Close open connections; for processes that live on after their last request."""
        self._client.close()

    # -- reading -------------------------------------------------------------------------------------------------

    def head(self, stream: str) -> Head:
        with self._explained("HEAD", stream):
            info = self._stream(stream).head()
        return Head(
            info.headers.get("content-type", ""),
            info.next_offset,
            info.position,
            info.closed,
            info.extensions,
            info.snapshot_offset,
            info.earliest_offset,
        )

    def read(self, stream: str, offset: str) -> Chunk:
        """Read from an offset to wherever the server ends its response."""
        with self._explained("GET", stream, offset):
            return self._stream(stream).read_chunk(offset)

    def frames(self, stream: str, offset: str, until: str, *, times: bool = False) -> tuple[Chunk, bool]:
        """Messages with their boundaries, never beyond `until`, and whether they have times as requested."""
        with self._explained("GET", stream, offset):
            try:
                chunk = self._stream(stream).read_frames(offset, until, times=times)
            except MalformedResponseError:
                if not times:
                    raise
                times = False
                chunk = self._stream(stream).read_frames(offset, until)
        if split_token(chunk.next_offset) <= split_token(offset):
            raise ServerRefusedError(
                f"{self._called(stream)}: no progress from offset {offset} to {until}.", status=200
            )
        return chunk, times

    def offset_at(self, stream: str, at_ms: int) -> str | None:
        """The offset of the first message that arrived at a time or later; None if the server does not store times."""
        with self._explained("HEAD", stream):
            try:
                return self._stream(stream).offset_at(at_ms)
            except MalformedResponseError:
                return None

    def splits(self, stream: str, start: str, end: str, count: int) -> list[Range]:
        """Split a range into about `count` parts of the same size."""
        with self._explained("GET", stream, start):
            return self._stream(stream).splits(start, end, count)

    def snapshot(self, stream: str, offset: str) -> Chunk:
        """The snapshot that replaces everything before `offset`."""
        with self._explained("GET", stream, offset):
            found = self._stream(stream).snapshot(offset)
        return Chunk(found.content_type, found.body, offset, up_to_date=False, closed=False)

    def listing(self, prefix: str) -> list[str]:
        """The names of the streams of the bucket."""
        return list(self.listed_tails(prefix))

    def listed_tails(self, prefix: str) -> dict[str, str]:
        """The tail of each stream of the bucket; empty if the server does not send it."""
        bucket = protocol_client.Bucket(self._connection.root, client=self._client)
        try:
            with self._explained("GET", "streams"):
                return {entry.name: entry.next_offset for entry in bucket.streams(prefix)}
        except StreamMissingError as missing:
            reason = f"There is no bucket {self._connection.bucket!r} at {self._connection.bucket_root}."
            raise ServerRefusedError(reason, status=404, code=missing.code) from None

    def tails(self, prefix: str) -> dict[str, Head]:
        """The heads of all streams with a prefix, from the listing of the server."""
        if self._connection.bucket:
            # The listing of a bucket does not have everything that a head has.
            names = list(self.listed_tails(prefix))
            with ThreadPoolExecutor(_PARALLEL_HEADS, thread_name_prefix="headwater-heads") as pool:
                found = pool.map(self._head_if_exists, names)
                return {name: head for name, head in zip(names, found, strict=True) if head is not None}
        with self._explained("GET", "__ds/streams"):
            entries = self._client.iterate(listing.listed_streams(self._client.policy, self._listing_url, prefix))
            return {entry.name: _head_of(entry) for entry in entries}

    def changes(self, prefix: str, cursor: str | None) -> HeadChanges | None:
        """Wait for streams that change after a cursor; None on a timeout. Without a cursor, only return a new one."""
        operation = listing.changed_streams(self._client.policy, self._listing_url, prefix, cursor)
        with self._explained("GET", "__ds/streams"):
            changed = self._client.run(operation)
        if changed is None:
            return None
        heads = {entry.name: None if entry.attributes.get("deleted") else _head_of(entry) for entry in changed.streams}
        return HeadChanges(heads, changed.cursor, changed.reset)

    @property
    def _listing_url(self) -> str:
        connection = self._connection
        return f"{connection.root}/streams" if connection.bucket else f"{connection.root}/__ds/streams"

    def _head_if_exists(self, stream: str) -> Head | None:
        try:
            return self.head(stream)
        except StreamMissingError:
            return None

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, stream: str, body: bytes, content_type: str, producer: Producer) -> Appended:
        with self._explained("POST", stream):
            return self._stream(stream, content_type).append_body(body, producer=producer)

    def create(self, stream: str, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        """Create a stream, or confirm that it exists with the same configuration."""
        with self._explained("PUT", stream):
            self._stream(stream).create(content_type, headers=headers)

    def close(self, stream: str) -> None:
        with self._explained("POST", stream):
            self._stream(stream).close()

    def publish_snapshot(self, stream: str, offset: str, body: bytes, content_type: str) -> None:
        """Publish the state that all messages before `offset` fold to. Repeating it is safe."""
        with self._explained("PUT", stream, offset):
            self._stream(stream).publish_snapshot(offset, body, content_type)

    # -- requests and errors -------------------------------------------------------------------------------------

    def url(self, stream: str, query: Mapping[str, str] | None = None) -> str:
        address = f"{self._connection.root}/{quote(stream, safe='/')}"
        return f"{address}?{urlencode(query)}" if query else address

    def credentials(self) -> dict[str, str]:
        """The authentication headers, with the current contents of the token file."""
        token = self._current_token() if self._connection.token_file else self._connection.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _current_token(self) -> str:
        """The token file's content, read again when the file changes."""
        path = Path(self._connection.token_file)
        changed_ns = path.stat().st_mtime_ns
        if changed_ns != self._token_read_ns:
            self._token = path.read_text(encoding="utf-8").strip()
            self._token_read_ns = changed_ns
        return self._token or self._connection.token

    def _stream(self, name: str, content_type: str | None = None) -> Stream:
        return Stream(self.url(name), client=self._client, content_type=content_type)

    def _called(self, stream: str) -> str:
        return f"stream {stream!r} at {self._connection.root}"

    def _root_hint(self) -> str:
        """A hint for a url that names the server instead of its stream root."""
        url = self._connection.url
        return "" if urlsplit(url).path else f" url must be the stream root, usually {url}/v1/stream."

    @contextmanager
    def _explained(self, method: str, stream: str, offset: str = "") -> Iterator[None]:
        """Translate errors of the client to ours, which name the stream, the offset and the option that helps."""
        try:
            yield
        except ClientError as error:
            if isinstance(error, ResponseError) and not error.is_transient:
                raise self._refusal(stream, offset, method, error) from None
            raise ServerUnreachableError(
                f"{method} {self._called(stream)}: no usable response for {self._connection.retry_timeout_s:.0f} s"
                f" (retryTimeout); the last error was {type(error).__name__}: {error}."
                " Check that the server runs and that url is correct."
            ) from None

    def _refusal(self, stream: str, offset: str, method: str, error: ResponseError) -> ServerRefusedError:
        status, code, said = error.status, error.code, error.detail
        called = self._called(stream) + (f", offset {offset}" if offset else "")
        match error:
            case StreamNotFoundError():
                return StreamMissingError(
                    f"{called}: there is no such stream ({status}: {said}).{self._root_hint()} It was never created,"
                    " was"
                    " deleted, or expired. For a source, onGone=restart waits for it; a sink creates it with"
                    " createMissing=true.",
                    status=status,
                    code=code,
                )
            case StreamRecreatedError():
                return SourceRecreatedError(f"{called}: {said} {READ_AGAIN}", status=status, code=code)
            case OffsetGoneError():
                return DataGoneError(
                    f"{called}: data at this offset is no longer retained ({said}). onGone=bootstrap reads the snapshot"
                    " instead and continues after it; onGone=skip continues with the earliest retained data.",
                    status=status,
                    code=code,
                    earliest=error.earliest_offset,
                )
            case ProducerFencedError():
                return BatchFencedError(
                    f"{called}: batch {error.current_epoch} was already written, so an older batch is rejected (403)."
                    " For a task or driver of an earlier batch this is expected. If the query itself fails with this,"
                    " its checkpoint is older than the stream: use the newer checkpoint, or a new producerId.",
                    status=status,
                    code=code,
                )
        hint = _HINTS.get(status, "") if status != 400 or offset else ""
        if isinstance(error, StreamClosedError):
            hint = " The stream is closed; nothing can be appended."
        return ServerRefusedError(f"{method} {called}: {status}, {said.rstrip('.')}.{hint}", status=status, code=code)


def _head_of(entry: StreamEntry) -> Head:
    """The head of a stream in a listing. Servers with that listing have all extensions."""
    return Head(
        entry.content_type,
        entry.next_offset,
        split_token(entry.next_offset)[0],
        bool(entry.attributes.get("closed")),
        _BOUNDING,
        entry.attributes.get("snapshot_offset"),
        entry.attributes.get("earliest_offset"),
    )


def _log_retry(error: ClientError, delay_s: float) -> None:
    log.info("%s; next attempt in %.1f s", error, delay_s)


READ_AGAIN: Final = "onGone=restart reads the new stream from its beginning."
"""What to do about a stream that was deleted and created again."""

_HINTS: Final = {
    400: " If the offset is invalid, the stream was recreated, or the checkpoint is from another server.",
    401: " Set token or tokenFile.",
    403: " The token does not allow this.",
    409: " If the content type differs, set contentType to that of the stream.",
    413: " Lower maxRequestBytes (sink), or raise the server's limits.",
}
