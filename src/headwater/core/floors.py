"""Floors: the first offset of each stream that can still be read, by its own name or through a fork.

Bytes before a stream's floor may be removed from storage. Invariant: a floor depends only on the catalog, so a server,
a backup and a check compute the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.core.catalog import StreamState
from headwater.core.offsets import Offset


def floors(streams: Iterable[StreamState]) -> dict[int, Offset]:
    """The floor of each stream: the earliest offset that it retains or that a fork, at any depth, still reads from it.

    For a deleted stream that is kept for its forks, only they count; if they need nothing of it, its floor is its tail.
    """
    by_id = {stream.id: stream for stream in streams}
    forks: dict[int, list[StreamState]] = {}
    for stream in by_id.values():
        if stream.fork is not None and stream.fork.source_id in by_id:
            forks.setdefault(stream.fork.source_id, []).append(stream)
    found = {id_: stream.tail if stream.deleted else stream.retained for id_, stream in by_id.items()}
    # Sources before their forks, processed in reverse: the floor of a fork is final before that of its source.
    in_order = [stream for id_, stream in by_id.items() if id_ in forks and not _has_source(stream, by_id)]
    for stream in in_order:
        in_order.extend(forks.get(stream.id, ()))
    for stream in reversed(in_order):
        for fork in forks.get(stream.id, ()):
            if found[fork.id].message_index < fork.base_index:
                found[stream.id] = min(found[stream.id], found[fork.id])
    return found


def own_start(stream: StreamState, floor: Offset) -> Offset:
    """Where a stream's own stored data begins: after what it shares with its source, and not before its floor."""
    return max(stream.base, floor)


def _has_source(stream: StreamState, by_id: dict[int, StreamState]) -> bool:
    return stream.fork is not None and stream.fork.source_id in by_id
