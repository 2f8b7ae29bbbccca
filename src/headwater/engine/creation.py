"""The record of a new stream, which may be a fork of an existing one."""

from __future__ import annotations

import secrets

from headwater.core.errors import Conflict
from headwater.core.records import Create
from headwater.core.retention import RetentionRule
from headwater.core.rules import CreateRequest, ForkRequest, decide_create, decide_fork
from headwater.engine.reading import StreamReader
from headwater.engine.stream import LiveStream
from headwater.engine.stream_refusals import not_found


def new_stream(request: CreateRequest, rule: RetentionRule, now_ms: int) -> Create:
    """The record of a stream that is not a fork."""
    tracks_age = rule.of(request.retention).tracks_age
    return decide_create(request, _new_id(), now_ms, tracks_age=tracks_age)


def new_fork(
    request: CreateRequest,
    requested: ForkRequest,
    source: LiveStream | None,
    reader: StreamReader,
    rule: RetentionRule,
    max_depth: int,
    now_ms: int,
) -> Create:
    """The record of a fork of `source`, which is the pending state of the stream that the request names."""
    if source is None or not (source.visible or source.deleted):
        raise not_found(requested.source_name)
    if source.deleted:
        raise Conflict(f"The source {source.name!r} was deleted and can no longer be forked; fork another stream.")
    if max_depth and reader.generation(source) >= max_depth:
        raise Conflict(
            f"The source {source.name!r} is already {max_depth} forks deep, which is the limit"
            " (limits.max_fork_depth); fork one of its sources instead."
        )
    # The fork point must be in durable data: a fork must never refer to bytes that a crash can lose.
    point = reader.fork_point(source, requested)
    tracks_age = rule.of(request.retention or source.retention).tracks_age
    return decide_fork(request, source, point, _new_id(), now_ms, tracks_age=tracks_age)


def _new_id() -> int:
    return secrets.randbits(63)
