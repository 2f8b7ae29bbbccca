"""Apply a batch of changes to a table: upsert and delete rows by key, in the order of their stream.

Invariant: when `upsert` returns, every change of the batch is applied or among the dead letters, and the positions of
its streams are updated; when it raises, nothing has changed.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.pipeline.fold.changes import Effect, change_of
from headwater.pipeline.loading import (
    BatchPart,
    DeadLetter,
    LoadResult,
    insert_dead_letters,
    insert_range,
    record_batch_done,
    split_dead_letters,
    split_offsets,
    stage,
)
from headwater.postgres import upserts
from headwater.postgres.connections import Connection
from headwater.postgres.tables import STAGED_FIRST
from headwater.postgres.upserts import StreamPosition, UpsertStatements

_NOT_A_CHANGE: Final = "The event is not a change with a key: insert, update, upsert, set, delete, remove or a reset."


class _Kind(Enum):
    CHANGE = "change"
    PATCH = "patch"
    RESET = "reset"


class _StagedRun(msgspec.Struct):
    """Consecutive staged rows that one statement applies."""

    kind: _Kind
    rows: pa.Table


def upsert(
    connection: Connection, how: UpsertStatements, part: BatchPart, events: pa.Table, event_bytes_max: int
) -> LoadResult:
    """Apply a batch. `events` has the columns stream, offset, position, content_type and value (bytes), each stream in
    order."""
    events = split_offsets(events)
    letters, rows = split_dead_letters(events, event_bytes_max)
    kinds, others = _kinds(rows)
    letters = letters + others
    with connection.transaction():
        streams = pc.unique(events["stream"]).to_pylist()
        known = upserts.lock_positions(connection, part.job, streams)
        is_new = [_is_new(known[stream], incarnation, position) for stream, incarnation, position in _places(rows)]
        keep = [new and kind is not None for new, kind in zip(is_new, kinds, strict=True)]
        rows = rows.filter(pa.array(keep, pa.bool_()))
        kinds = [kind for kind, kept in zip(kinds, keep, strict=True) if kept]
        if rows.num_rows:
            stage(connection, rows)
            recreated = {stream for stream in streams if known[stream].incarnation}
            for segment in _segments(rows, kinds, known, recreated):
                letters += _apply(connection, how, segment)
        insert_dead_letters(connection, part.job, events, letters)
        for stream, end in _ends(events, known).items():
            upserts.move_position(connection, part.job, stream, end)
        record_batch_done(connection, part, events.num_rows - len(letters), len(letters))
    return LoadResult(events.num_rows - len(letters), len(letters))


def _apply(connection: Connection, how: UpsertStatements, segment: _StagedRun) -> list[DeadLetter]:
    if segment.kind is _Kind.RESET:
        number = segment.rows["n"][0].as_py()
        connection.execute(how.reset.replace(STAGED_FIRST, str(number)).encode())
        return []
    if segment.kind is _Kind.CHANGE:
        return insert_range(connection, how.upsert, segment.rows)
    updated: list[int] = []
    letters = insert_range(connection, how.patch, segment.rows, updated)
    # Without a row to patch, insert the fields of the change.
    return letters if letters or any(updated) else insert_range(connection, how.upsert, segment.rows)


def _kinds(rows: pa.Table) -> tuple[list[_Kind | None], list[DeadLetter]]:
    """The kind of each row, and dead letters for the rows that are not changes."""
    kinds: list[_Kind | None] = []
    letters: list[DeadLetter] = []
    for number, payload in zip(rows["n"].to_pylist(), rows["payload"].to_pylist(), strict=True):
        change = change_of(payload.encode())
        if change is None or change.effect is Effect.APPEND:
            kinds.append(None)
            letters.append(DeadLetter(number, "not-a-change", _NOT_A_CHANGE))
        elif change.effect is Effect.RESET:
            kinds.append(_Kind.RESET)
        else:
            kinds.append(_Kind.PATCH if change.unchanged else _Kind.CHANGE)
    return kinds, letters


def _segments(
    rows: pa.Table, kinds: list[_Kind | None], known: dict[str, StreamPosition], recreated: set[str]
) -> list[_StagedRun]:
    """Split changes into runs. A patch, a reset and the first change of a recreated stream each form their own run."""
    segments: list[_StagedRun] = []
    first = 0
    for number, (stream, incarnation, _) in enumerate(_places(rows)):
        is_recreated = stream in recreated and incarnation not in ("", known[stream].incarnation)
        kind = kinds[number]
        if kind is _Kind.CHANGE and not is_recreated:
            continue
        if number > first:
            segments.append(_StagedRun(_Kind.CHANGE, rows.slice(first, number - first)))
        if is_recreated:
            recreated.discard(stream)
            segments.append(_StagedRun(_Kind.RESET, rows.slice(number, 1)))
        assert kind is not None, "rows that are not changes were removed"
        if kind is not _Kind.RESET or not is_recreated:
            segments.append(_StagedRun(kind, rows.slice(number, 1)))
        first = number + 1
    if rows.num_rows > first:
        segments.append(_StagedRun(_Kind.CHANGE, rows.slice(first)))
    return segments


def _places(rows: pa.Table) -> list[tuple[str, str, int]]:
    columns = (rows[name].to_pylist() for name in ("stream", "incarnation", "position"))
    return list(zip(*columns, strict=True))


def _is_new(known: StreamPosition, incarnation: str, position: int) -> bool:
    is_other = bool(incarnation and known.incarnation) and incarnation != known.incarnation
    return is_other or position >= known.position


def _ends(events: pa.Table, known: dict[str, StreamPosition]) -> dict[str, StreamPosition]:
    """The position of each stream after the batch, which never moves backwards."""
    ends: dict[str, StreamPosition] = {}
    for stream, incarnation, position in _places(events):
        if _is_new(ends.get(stream, known[stream]), incarnation, position):
            ends[stream] = StreamPosition(incarnation or known[stream].incarnation, position + 1)
    return ends
