"""Listing and following many streams: one long-poll shows which of them changed, and those are read. No I/O.

Following needs the listing of changes, an extension of Headwater. Invariant: each message of each stream is handed out
once, in the order of its stream; what a stream has when it is found, or created later, is included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.client.effects import Emit, Operation, Policy
from headwater.client.errors import ClientError, ResponseError, StreamNotFoundError, StreamRecreatedError
from headwater.client.listing import changed_streams, listed_streams, registered_streams, stream_url
from headwater.client.operations import StreamOperations
from headwater.client.reading import Position, read
from headwater.client.results import BEGINNING, Batch, StreamEntry


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A batch of one of many streams."""

    name: str
    batch: Batch


def all_streams(policy: Policy, base_url: str, prefix: str) -> Operation[list[StreamEntry]]:
    """The streams with a prefix, from the listing of the server, or from its registry."""
    root = f"{base_url}/v1/stream"
    try:
        return (yield from _collected(listed_streams(policy, f"{root}/__ds/streams", prefix)))
    except ResponseError as error:
        if error.status not in {400, 404, 405}:
            raise
    return (yield from registered_streams(policy, root, prefix))


def follow_many(policy: Policy, base_url: str, prefix: str, offsets: Mapping[str, str] | None) -> Operation[None]:
    """Emit a `StreamBatch` for everything in the streams with a prefix, then for what is appended to any of them.

    `offsets` has, by name, where to continue in streams that were read before; others are read from their beginning.
    """
    listing_url = f"{base_url}/v1/stream/__ds/streams"
    many = _Many(policy, base_url, dict(offsets or {}))
    patient = Policy(policy.follow_retry, on_retry=policy.on_retry, clock=policy.clock)
    cursor: str | None = None
    while True:
        if cursor is None:
            # The cursor first: what changes while the streams are listed is then in the next answer.
            first = yield from changed_streams(policy, listing_url, prefix, None)
            entries = yield from _collected(listed_streams(policy, listing_url, prefix))
            yield from many.catch_up(entries)
            cursor = first.cursor if first is not None else None
            continue
        changed = yield from changed_streams(patient, listing_url, prefix, cursor)
        if changed is None:
            continue
        cursor = None if changed.reset else changed.cursor
        yield from many.catch_up(changed.streams)


class _Many:
    """How far each stream was read."""

    def __init__(self, policy: Policy, base_url: str, offsets: dict[str, str]) -> None:
        self._policy = policy
        self._base_url = base_url
        self._offsets = offsets

    def catch_up(self, entries: list[StreamEntry]) -> Operation[None]:
        for entry in entries:
            if entry.attributes.get("deleted"):
                self._offsets.pop(entry.name, None)
            elif self._offsets.get(entry.name) != entry.next_offset:
                yield from self._read(entry.name)

    def _read(self, name: str) -> Operation[None]:
        operations = StreamOperations(stream_url(self._base_url, name), self._policy)

        def take(batch: Batch) -> StreamBatch | None:
            self._offsets[name] = batch.next_offset
            return StreamBatch(name, batch) if batch.bodies else None

        try:
            yield from read(operations, Position(self._offsets.get(name, BEGINNING)), take)
        except StreamRecreatedError:
            yield from read(operations, Position(BEGINNING), take)
        except StreamNotFoundError:
            # Deleted since it was listed; the listing will say so.
            self._offsets.pop(name, None)


def _collected(operation: Operation[None]) -> Operation[list[Any]]:
    """The values that an operation emits, as a list."""
    found: list[Any] = []
    try:
        effect = next(operation)
        while True:
            if isinstance(effect, Emit):
                found.append(effect.value)
                effect = operation.send(None)
                continue
            try:
                result = yield effect
            except ClientError as error:
                effect = operation.throw(error)
            else:
                effect = operation.send(result)
    except StopIteration:
        return found
