"""Reads for pipelines: bounded, splittable, with every message's boundary (our extensions; see docs/extensions.md).

`until` ends a catch-up read at an offset, whatever was appended since, so that a planned range reads the same for
ever. `splits` names message boundaries that cut a range into parts of about equal size. `frames` sends the messages
with their lengths in front, so that a reader of any content type gets them one by one without parsing.
None of them changes an answer to a request that does not ask for it.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec

from headwater.core.errors import BadRequest, InvalidOffset
from headwater.core.offsets import NOW, Offset
from headwater.engine.reading import Chunk
from headwater.engine.stream import LiveStream
from headwater.http import read
from headwater.http.request import Request
from headwater.http.response import NO_STORE, OK, STREAM_CLOSED, UP_TO_DATE, header, next_offset

if TYPE_CHECKING:
    from headwater.http.app import App
    from headwater.http.connection import Connection

SPLITS_MAX: Final = 10_000
FRAMES_TYPE: Final = "application/vnd.headwater.frames"
PARAMETERS: Final = ("until", "splits", "frames")

_COUNT: Final = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_encode_json: Final = msgspec.json.Encoder().encode


def asked_for(query: Mapping[str, str]) -> bool:
    return any(name in query for name in PARAMETERS)


def handle(
    app: App, connection: Connection, request: Request, stream: LiveStream, start: Offset, query: Mapping[str, str]
) -> None:
    """Answer a read that uses one of the extensions."""
    if "live" in query or query.get("offset") == NOW:
        raise BadRequest("until, splits and frames are for catch-up reads from a place in the stream.")
    until = _until(app, stream, start, query.get("until"))
    if "splits" in query:
        _reply_splits(app, connection, stream, start, until, query["splits"])
        return
    chunk = _bounded(app, stream, start, until, app.limits.max_chunk_bytes)
    if "frames" not in query:
        read.reply_chunk(app, connection, request, chunk)
    elif query["frames"] == "1":
        _reply_frames(app, connection, chunk)
    else:
        raise BadRequest("frames must be 1.")


def _until(app: App, stream: LiveStream, start: Offset, token: str | None) -> Offset:
    until = app.engine.reader.resolve(stream, token if token is not None else NOW)
    if until < start:
        raise InvalidOffset(f"until ({until}) lies before offset ({start}).")
    return until


def _bounded(app: App, stream: LiveStream, start: Offset, until: Offset, max_bytes: int) -> Chunk:
    chunk = app.engine.reader.run(stream, start, until, max_bytes)
    at_tail = chunk.end.index == stream.durable_index
    return replace(chunk, up_to_date=at_tail, closed=at_tail and stream.durable_closed)


def _reply_frames(app: App, connection: Connection, chunk: Chunk) -> None:
    """A count, that many stored lengths, and the stored bytes; all numbers are 32 bits, little-endian."""
    lengths = array("I", app.engine.reader.lengths(chunk))
    if sys.byteorder == "big":
        lengths.byteswap()
    prefix = len(lengths).to_bytes(4, "little") + lengths.tobytes()
    headers = b"".join(
        (
            NO_STORE,
            header("Content-Type", FRAMES_TYPE),
            header("Stream-Content-Type", chunk.stream.type.header),
            next_offset(chunk.end.index, chunk.end.position),
            position(chunk.end.index),
            UP_TO_DATE if chunk.up_to_date else b"",
            STREAM_CLOSED if chunk.closed else b"",
        )
    )
    app.metrics.read_bytes += chunk.length
    slices = chain((prefix,), app.engine.reader.slices(chunk))
    connection.reply_slices(OK, headers, len(prefix) + chunk.length, slices)


def _reply_splits(
    app: App, connection: Connection, stream: LiveStream, start: Offset, until: Offset, asked: str
) -> None:
    if _COUNT.fullmatch(asked) is None or int(asked) > SPLITS_MAX:
        raise BadRequest(f"splits must be a whole number from 1 to {SPLITS_MAX}.")
    share = max(1, -(-(until.position - start.position) // int(asked)))
    ranges: list[dict[str, str | int]] = []
    at = start
    while at.index < until.index:
        end = app.engine.reader.run(stream, at, until, share).end
        ranges.append(
            {
                "start": str(at),
                "end": str(end),
                "start_position": at.index,
                "end_position": end.index,
                "bytes": end.position - at.position,
            }
        )
        at = end
    headers = NO_STORE + b"Content-Type: application/json\r\n" + next_offset(until.index, until.position)
    connection.reply(OK, headers + position(until.index), _encode_json({"ranges": ranges}))


def position(index: int) -> bytes:
    """How many messages lie before the offset that the answer names."""
    return b"Stream-Next-Position: %d\r\n" % index
