"""Compressed bodies: negotiate the coding, and compress each chunk of a stream once, on threads.

A chunk of a stream never changes, so it is compressed once for many readers. The event loop only copies at most
`CHUNK_MAX_BYTES` and passes them to a thread. Invariant: the cache, and the number of running compressions, are
limited; beyond that a client gets the plain bytes, which it always accepts.
"""

from __future__ import annotations

import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Final, Literal, Protocol, TypeAlias

import zstandard

from headwater.core.errors import Refusal
from headwater.engine.background_threads import Background
from headwater.engine.scheduler import Scheduler
from headwater.engine.slices import Slices
from headwater.http.headers import VARY_ENCODING, header
from headwater.http.responses import Channel, PiecewiseResponse, Response

Coding: TypeAlias = Literal["zstd", "gzip", "deflate"]

CODINGS: Final[tuple[Coding, ...]] = ("zstd", "gzip", "deflate")
"""In the order of preference, if a client accepts several equally."""
MIN_BYTES: Final = 1024
"""Compression hardly makes a shorter body smaller."""
CHUNK_MAX_BYTES: Final = 2**20
"""A compressed read returns at most this much, so that copying it does not block the event loop."""
KEPT_MAX_BYTES: Final = 32 * 2**20
"""Compressed chunks that are kept for other readers."""
RUNNING_MAX: Final = 32
"""Chunks that are being compressed at the same time; others are sent as they are."""

_ZLIB_LEVEL: Final = 5
_ZSTD_LEVEL: Final = 3
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
"""The window bits that select the format in zlib."""
ACCEPT_MAX_BYTES: Final = 1000
"""For a longer Accept-Encoding, which no browser sends, the body is not compressed."""
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_WEIGHT: Final = re.compile(r"[Qq]=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")
_COMPRESSIBLE: Final = re.compile(
    r"text/(?!event-stream).*|application/(?:.*\+)?(?:json|xml|yaml)|application/(?:x-)?(?:nd-?json|jsonlines|javascript)"
    r"|image/svg\+xml"
)


def accepted_coding(header: bytes) -> Coding | None:
    """The best coding that an Accept-Encoding header allows; None for a plain body (RFC 9110 §12.5.3)."""
    return _best_coding(header) if len(header) <= ACCEPT_MAX_BYTES else None


@lru_cache(256)
def _best_coding(header: bytes) -> Coding | None:
    weights: dict[str, float] = {}
    for item in header.decode("latin-1").split(","):
        name, parameter, text = (part.strip() for part in item.partition(";"))
        given = _WEIGHT.fullmatch(text)
        if _TOKEN.fullmatch(name) and (given is not None or not parameter):
            weights[name.lower()] = float(given[1]) if given is not None else 1.0
    others = weights.get("*", 0.0)
    if "x-gzip" in weights:
        weights.setdefault("gzip", weights["x-gzip"])
    best, best_weight = None, 0.0
    for coding in CODINGS:
        weight = weights.get(coding, others)
        if weight > best_weight:
            best, best_weight = coding, weight
    # Without an explicit weight, the plain body is used when nothing else is accepted.
    return best if best_weight >= weights.get("identity", 0.0) else None


@lru_cache(1024)
def is_compressible(media_type: str) -> bool:
    """Whether compression makes bodies of this type smaller."""
    return _COMPRESSIBLE.fullmatch(media_type) is not None


def compress(coding: Coding, data: bytes) -> bytes:
    if coding == "zstd":
        return zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(data)
    compressor = zlib.compressobj(_ZLIB_LEVEL, wbits=_WINDOW_BITS[coding])
    return compressor.compress(data) + compressor.flush()


class StreamCompressor(Protocol):
    """Compresses a body of unknown length; the client can decode every piece at once."""

    def piece(self, data: bytes) -> bytes: ...

    def end(self) -> bytes: ...


class ZlibStream:
    """A live body in gzip or deflate."""

    def __init__(self, coding: Literal["gzip", "deflate"]) -> None:
        self._compressor = zlib.compressobj(1, wbits=_WINDOW_BITS[coding])

    def piece(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        return self._compressor.flush()


class ZstdStream:
    """A live body in zstd."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(1).compressobj()

    def piece(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

    def end(self) -> bytes:
        return self._compressor.flush()


def stream_compressor(coding: Coding) -> StreamCompressor:
    return ZstdStream() if coding == "zstd" else ZlibStream(coding)


class CompressedChannel:
    """A channel whose body is compressed. Every piece can be decoded when it arrives."""

    __slots__ = ("_channel", "_coding", "_compressor")

    def __init__(self, channel: Channel, coding: Coding) -> None:
        self._channel = channel
        self._coding = coding
        self._compressor = stream_compressor(coding)

    @property
    def writable(self) -> bool:
        return self._channel.writable

    def begin_body(self, headers: bytes) -> None:
        coding = header("Content-Encoding", self._coding) + VARY_ENCODING
        self._channel.begin_body(headers + coding)

    def write(self, data: bytes) -> None:
        self._channel.write(self._compressor.piece(data))

    def write_chunk(self, chunk: bytes) -> None:
        raise AssertionError("a shared chunk cannot be sent on a compressed channel")

    def offer_chunk(self, chunk: bytes) -> bool:
        raise AssertionError("a shared chunk cannot be sent on a compressed channel")

    def yield_turn(self) -> None:
        self._channel.yield_turn()

    def end_body(self) -> None:
        self._channel.write(self._compressor.end())
        self._channel.end_body()

    def respond(self, response: Response | PiecewiseResponse) -> None:
        self._channel.respond(response)

    def refuse(self, refusal: Refusal) -> None:
        self._channel.refuse(refusal)


class CompressedChunks:
    """A cache of compressed chunks, by ETag and coding; the most recently used ones are kept."""

    def __init__(self, background: Background, scheduler: Scheduler, kept_max_bytes: int = KEPT_MAX_BYTES) -> None:
        self._background = background
        self._slices = Slices(scheduler)
        self._kept_max_bytes = kept_max_bytes
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._waiting: dict[bytes, list[Callable[[bytes], None]]] = {}
        self.compressed = 0
        """The number of chunks that were compressed."""

    @property
    def is_busy(self) -> bool:
        return len(self._waiting) >= RUNNING_MAX

    def get(self, etag: bytes) -> bytes | None:
        found = self._kept.get(etag)
        if found is not None:
            self._kept.move_to_end(etag)
        return found

    def make(self, etag: bytes, coding: Coding, data: Callable[[], bytes], done: Callable[[bytes], None]) -> None:
        """Call `done` with the compressed chunk, on the event loop. `etag` identifies the bytes and the coding."""
        waiting = self._waiting.get(etag)
        if waiting is not None:
            waiting.append(done)
            return
        plain = data()
        self._waiting[etag] = [done]
        result: list[bytes] = []
        self._background.run(lambda: result.append(compress(coding, plain)), partial(self._made, etag, result))

    def _made(self, etag: bytes, result: list[bytes], error: BaseException | None) -> None:
        waiting = self._waiting.pop(etag)
        if error is not None:
            raise error
        self.compressed += 1
        (data,) = result
        if len(data) <= self._kept_max_bytes // 4:
            self._kept[etag] = data
            self._kept_bytes += len(data)
            while self._kept_bytes > self._kept_max_bytes:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])
        if len(waiting) == 1:
            waiting[0](data)
        else:
            self._slices.add(_deliver(waiting, data), _delivered)

    def close(self) -> None:
        self._background.close()


def _deliver(waiting: list[Callable[[bytes], None]], data: bytes) -> Iterator[None]:
    """Complete the waiting requests one by one: hundreds may wait for the same chunk."""
    for done in waiting:
        done(data)
        yield


def _delivered(error: Exception | None) -> None:
    if error is not None:
        raise error
