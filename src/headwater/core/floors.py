"""Floors: the first place of each stream that anybody can still ask for, by its own name or through a fork.

What lies before a stream's floor may be gone from storage, and need not be kept by anyone. Invariant: a floor depends
on nothing but the catalog, so whoever has that (a server, a copy, a check) comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.core.catalog import StreamState
from headwater.core.offsets import Offset


def floors(streams: Iterable[StreamState]) -> dict[int, Offset]:
    """For each stream: what it retains, and before that what its forks, at whatever depth, still read from it.

    A stream that was deleted and lives on for its forks counts for nothing but them; its tail, if they need none of it.
    """
    by_id = {stream.id: stream for stream in streams}
    forks: dict[int, list[StreamState]] = {}
    for stream in by_id.values():
        if stream.fork is not None and stream.fork.source_id in by_id:
            forks.setdefault(stream.fork.source_id, []).append(stream)
    found = {id_: stream.tail if stream.deleted else stream.retained for id_, stream in by_id.items()}
    # Sources before their forks, then in reverse: a fork's floor is final before its source asks for it.
    in_order = [stream for id_, stream in by_id.items() if id_ in forks and not _has_source(stream, by_id)]
    for stream in in_order:
        in_order.extend(forks.get(stream.id, ()))
    for stream in reversed(in_order):
        for fork in forks.get(stream.id, ()):
            if found[fork.id].index < fork.base_index:
                found[stream.id] = min(found[stream.id], found[fork.id])
    return found


def own_start(stream: StreamState, floor: Offset) -> Offset:
    """Where what a stream itself keeps begins: after what it shares with its source, and not before its floor."""
    return max(stream.base, floor)


def _has_source(stream: StreamState, by_id: dict[int, StreamState]) -> bool:
    return stream.fork is not None and stream.fork.source_id in by_id
