"""A thin client of the streams protocol, for the driver and for tasks: one call is one request, tried again if safe.

Invariant: a request that is not idempotent is never sent twice. Reads, creates and closes are; an append is only
with producer headers, and there is no append here without them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

import msgspec
import urllib3

from headwater.spark.errors import (
    Fenced,
    OffsetGone,
    ServerRefused,
    ServerUnreachable,
    StreamMissing,
    StreamRecreated,
)
from headwater.spark.offsets import split_token
from headwater.spark.options import Connection

log = logging.getLogger("headwater.spark")

FRAMES_TYPE: Final = "application/vnd.headwater.frames"

_BACK_OFF_FIRST_S: Final = 0.05
_BACK_OFF_MAX_S: Final = 3.0
_TRY_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_LISTING_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Head:
    """What a stream is, and where it ends."""

    content_type: str
    offset: str
    position: int | None
    closed: bool
    extensions: frozenset[str]
    snapshot: str | None

    @property
    def bounds_reads(self) -> bool:
        """Whether the server has what a planned range needs: an end, its place in the stream, message boundaries."""
        return {"until", "splits", "frames", "position"} <= self.extensions


@dataclass(frozen=True, slots=True)
class Chunk:
    """One answer to a read."""

    content_type: str
    body: bytes
    next_offset: str
    up_to_date: bool


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a stream that the server named."""

    start: str
    end: str
    start_position: int
    end_position: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Producer:
    """Who appends: the three headers that make an append safe to repeat."""

    id: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of an append. `digest` is what the stream took before, if this one was a repeat."""

    duplicate: bool
    digest: str | None


class _Splits(msgspec.Struct):
    ranges: list[Range]


class _Listed(msgspec.Struct):
    stream_id: str
    next_offset: str = ""


class _Page(msgspec.Struct):
    streams: list[_Listed]
    has_more: bool = False
    next_cursor: str | None = None


class _Problem(msgspec.Struct):
    code: str = ""
    detail: str = ""


def digest_of(body: bytes) -> str:
    """As the server spells it in `Producer-Digest`."""
    return f"crc32:{zlib.crc32(body):08x}:{len(body)}"


@functools.lru_cache(maxsize=16)
def connect(connection: Connection) -> Client:
    """The client of this process: Python workers live on between tasks, and so do their connections."""
    return Client(connection)


class Client:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._token = ""
        self._token_read_ns = -1
        self._pool = urllib3.PoolManager(
            maxsize=32,
            retries=False,
            timeout=urllib3.Timeout(connect=10.0, read=connection.request_timeout_s),
            ca_certs=connection.ca_file or None,
        )

    # -- reading -------------------------------------------------------------------------------------------------

    def head(self, stream: str) -> Head:
        headers = self._ask("HEAD", stream, "").headers
        position = headers.get("Stream-Next-Position")
        extensions = headers.get("Stream-Extensions", "")
        return Head(
            headers.get("Content-Type", ""),
            headers["Stream-Next-Offset"],
            int(position) if position is not None else None,
            headers.get("Stream-Closed") == "true",
            frozenset(name.strip() for name in extensions.split(",") if name.strip()),
            headers.get("Stream-Snapshot-Offset"),
        )

    def read(self, stream: str, offset: str) -> Chunk:
        """From an offset to wherever the server ends its answer."""
        return self._chunk(stream, offset, {"offset": offset})

    def frames(self, stream: str, offset: str, until: str) -> Chunk:
        """Messages with their boundaries, never beyond `until`."""
        chunk = self._chunk(stream, offset, {"offset": offset, "until": until, "frames": "1"})
        if split_token(chunk.next_offset) <= split_token(offset):
            raise ServerRefused(f"{self._called(stream)}: no progress from offset {offset} to {until}.", status=200)
        return chunk

    def splits(self, stream: str, start: str, end: str, count: int) -> list[Range]:
        query = {"offset": start, "until": end, "splits": str(count)}
        response = self._ask("GET", stream, start, query)
        return msgspec.json.decode(response.data, type=_Splits).ranges

    def snapshot(self, stream: str, offset: str) -> Chunk:
        """The snapshot that stands for everything before `offset`."""
        response = self._ask("GET", f"{stream}/snapshot/{offset}", offset)
        return Chunk(response.headers.get("Content-Type", ""), response.data, offset, up_to_date=False)

    def listing(self, prefix: str) -> list[str]:
        """The names of the streams of our bucket."""
        return list(self.listed_tails(prefix))

    def listed_tails(self, prefix: str) -> dict[str, str]:
        """Where each stream of our bucket ends; empty texts where the server does not say."""
        tails: dict[str, str] = {}
        query = {"limit": str(_LISTING_PAGE)} | ({"prefix": prefix} if prefix else {})
        while True:
            try:
                response = self._ask("GET", "streams", "", query)
            except StreamMissing as missing:
                reason = f"There is no bucket {self._connection.bucket!r} at {self._connection.bucket_root}."
                raise ServerRefused(reason, status=404, code=missing.code) from None
            page = msgspec.json.decode(response.data, type=_Page)
            tails |= {stream.stream_id: stream.next_offset for stream in page.streams}
            if not page.has_more or not page.streams:
                return tails
            query["after"] = page.next_cursor or page.streams[-1].stream_id

    def _chunk(self, stream: str, offset: str, query: Mapping[str, str]) -> Chunk:
        response = self._ask("GET", stream, offset, query)
        headers = response.headers
        return Chunk(
            headers.get("Stream-Content-Type") or headers.get("Content-Type", ""),
            response.data,
            headers["Stream-Next-Offset"],
            headers.get("Stream-Up-To-Date") == "true",
        )

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, stream: str, body: bytes, content_type: str, producer: Producer) -> Appended:
        headers = {
            "Content-Type": content_type,
            "Producer-Id": producer.id,
            "Producer-Epoch": str(producer.epoch),
            "Producer-Seq": str(producer.seq),
        }
        response = self._ask("POST", stream, "", body=body, headers=headers)
        return Appended(response.status == 204, response.headers.get("Producer-Digest"))

    def create(self, stream: str, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        """Create it, or find it there."""
        self._ask("PUT", stream, "", headers={"Content-Type": content_type, **(headers or {})})

    def close(self, stream: str) -> None:
        self._ask("POST", stream, "", headers={"Stream-Closed": "true"})

    # -- one request ---------------------------------------------------------------------------------------------

    def url(self, stream: str, query: Mapping[str, str] | None = None) -> str:
        address = f"{self._connection.root}/{quote(stream, safe='/')}"
        return f"{address}?{urlencode(query)}" if query else address

    def credentials(self) -> dict[str, str]:
        """Who we are, with the token file as it is now."""
        connection = self._connection
        if connection.token_file:
            path = Path(connection.token_file)
            changed_ns = path.stat().st_mtime_ns
            if changed_ns != self._token_read_ns:
                self._token = path.read_text(encoding="utf-8").strip()
                self._token_read_ns = changed_ns
        token = self._token or connection.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _ask(
        self,
        method: str,
        stream: str,
        offset: str,
        query: Mapping[str, str] | None = None,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        url = self.url(stream, query)
        deadline = time.monotonic() + self._connection.retry_timeout_s
        back_off_s = _BACK_OFF_FIRST_S
        while True:
            wait_s = 0.0
            try:
                response = self._pool.request(
                    method,
                    url,
                    body=body,
                    headers={"Accept-Encoding": "identity", **self.credentials(), **(headers or {})},
                    redirect=False,
                )
                if response.status < 300:
                    return response
                if response.status not in _TRY_AGAIN:
                    raise self._refusal(stream, offset, method, response)
                trouble = f"{response.status} {_problem(response).detail}".strip()
                with contextlib.suppress(ValueError):
                    wait_s = float(response.headers.get("Retry-After", "0"))
            except urllib3.exceptions.HTTPError as error:
                trouble = f"{type(error).__name__}: {error}"
            now = time.monotonic()
            if now + max(wait_s, back_off_s) > deadline:
                raise ServerUnreachable(
                    f"{method} {self._called(stream)}: no usable answer for {self._connection.retry_timeout_s:.0f} s"
                    f" (retryTimeout); the last trouble was {trouble}. Is the server up, and is url right?"
                )
            log.info("%s %s: %s; trying again", method, stream, trouble)
            time.sleep(max(wait_s, back_off_s * random.uniform(0.5, 1.0)))
            back_off_s = min(back_off_s * 2, _BACK_OFF_MAX_S)

    def _called(self, stream: str) -> str:
        return f"stream {stream!r} at {self._connection.root}"

    def _refusal(self, stream: str, offset: str, method: str, response: urllib3.BaseHTTPResponse) -> ServerRefused:
        status = response.status
        problem = _problem(response)
        said = problem.detail or response.data[:200].decode("utf-8", "replace").strip() or "no explanation"
        called = self._called(stream) + (f", offset {offset}" if offset else "")
        if status == 404 or (status == 410 and problem.code == "stream_deleted"):
            return StreamMissing(
                f"{called}: there is no such stream ({status}: {said}). It was never created, was deleted, or expired."
                " For a source, onGone=restart waits for it; a sink creates it with createMissing=true.",
                status=status,
                code=problem.code,
            )
        if problem.code == "stream_recreated":
            return StreamRecreated(f"{called}: {said} {READ_AGAIN}", status=status, code=problem.code)
        if status == 410:
            return OffsetGone(
                f"{called}: data from here on is no longer retained ({said}). onGone=bootstrap reads the snapshot"
                " instead and goes on behind it; onGone=skip goes on with what is left.",
                status=status,
                code=problem.code,
                earliest=response.headers.get("Stream-Earliest-Offset"),
            )
        if status == 403 and "Producer-Epoch" in response.headers:
            return Fenced(
                f"{called}: batch {response.headers['Producer-Epoch']} has written already, so an older one may not"
                " (403). A leftover task of an earlier batch ends like this, and should. If it is the query itself:"
                " its checkpoint is older than the stream; use a new producerId, or the newer checkpoint.",
                status=status,
                code=problem.code,
            )
        hint = _HINTS.get(status, "") if status != 400 or offset else ""
        if status == 409 and response.headers.get("Stream-Closed") == "true":
            hint = " The stream is closed: nothing can be appended to it any more."
        refused = f"{method} {called}: {status}, {said.rstrip('.')}.{hint}"
        return ServerRefused(refused, status=status, code=problem.code)


READ_AGAIN: Final = "onGone=restart reads the new stream from its beginning."
"""What to do about a stream that was deleted and created again."""

_HINTS: Final = {
    400: " If it is the offset: was the stream deleted and created again, or the checkpoint made on another server?",
    401: " Set token or tokenFile.",
    403: " The token does not allow this.",
    409: " If it is the content type: set contentType to that of the stream.",
    413: " Lower maxRequestBytes (sink), or raise the server's limits.",
}


def _problem(response: urllib3.BaseHTTPResponse) -> _Problem:
    """What the body of a refusal says, if it says it in the way of RFC 9457."""
    if "json" not in response.headers.get("Content-Type", ""):
        return _Problem()
    try:
        return msgspec.json.decode(response.data, type=_Problem)
    except (msgspec.DecodeError, json.JSONDecodeError):
        return _Problem()
