"""Insert a batch of events into a table: stage them with COPY, insert them with one statement, in one transaction.

Invariant: when `load` returns, every event of the batch is in the table, or among the dead letters with the reason;
when it raises, none is. An event that is already in the table is not changed.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final

import msgspec
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from headwater.postgres import tables
from headwater.postgres.connections import Connection, is_row_error
from headwater.postgres.tables import ONLY_NEW, STAGED_FIRST, STAGED_LAST, EventMapping

_STAGE: Final = (
    "CREATE TEMP TABLE IF NOT EXISTS headwater_staged (n bigint, stream text, ds_offset text, incarnation text,"
    " position bigint, payload text) ON COMMIT DELETE ROWS"
)
_COPY: Final = "COPY pg_temp.headwater_staged FROM STDIN (FORMAT csv)"
_INSERT_DEAD_LETTER: Final = (
    "INSERT INTO headwater.dead_letters (job, stream_name, ds_offset, ds_incarnation, reason, detail, content_type,"
    " value) SELECT %(job)s, %(stream)s, %(offset)s, %(incarnation)s, %(reason)s, %(detail)s, %(content_type)s,"
    " %(value)s WHERE NOT EXISTS (SELECT 1 FROM headwater.dead_letters WHERE job = %(job)s AND stream_name = %(stream)s"
    " AND ds_offset = %(offset)s AND ds_incarnation = '' AND value = %(value)s)"
    " ON CONFLICT (job, stream_name, ds_offset, ds_incarnation) DO NOTHING"
)
_DECIDED: Final = (
    "SELECT stream_name, ds_incarnation FROM headwater.earlier_rows WHERE table_name = %s AND stream_name = ANY(%s)"
)
_UNRELATED: Final = (
    "INSERT INTO headwater.earlier_rows SELECT %s, name, '' FROM unnest(%s::text[]) AS name ON CONFLICT DO NOTHING"
)
_RECORD_BATCH: Final = (
    "INSERT INTO headwater.batches (job, query, partition, batch, events, dead) VALUES (%s, %s, %s, %s, %s, %s)"
    " ON CONFLICT (job, query, partition) DO UPDATE SET batch = excluded.batch, events = excluded.events,"
    " dead = excluded.dead, done_at = now()"
)
_CSV: Final = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")
_DETAIL_MAX: Final = 1000
_WITH_INCARNATION: Final = r"^[0-9a-f]{16}_[0-9a-f]{16}_[0-9a-f]{16}$"
_PLACE_LENGTH: Final = 33


class LoadStatements(msgspec.Struct, frozen=True, tag=True):
    """The statements that insert events into one table (see `postgres.tables`)."""

    table: str
    insertion: str
    only_new: str
    adoption: str


def statements(connection: Connection, mapped: EventMapping) -> LoadStatements:
    return LoadStatements(
        mapped.table.text,
        tables.insertion(connection, mapped),
        tables.only_new(connection, mapped),
        tables.adoption(connection, mapped),
    )


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The part of a batch that one task writes."""

    job: str
    query: str
    batch: int
    partition: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    events: int
    dead: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    row: int
    reason: str
    detail: str


def load(
    connection: Connection, how: LoadStatements, part: BatchPart, events: pa.Table, event_bytes_max: int
) -> LoadResult:
    """Load a batch. `events` has the columns stream, offset, position, content_type and value (bytes), each stream in
    order."""
    events = split_offsets(events)
    letters, rows = split_dead_letters(events, event_bytes_max)
    with connection.transaction():
        if rows.num_rows:
            stage(connection, rows)
            insertion = how.insertion
            if _may_exist(connection, how, rows):
                insertion = insertion.replace(ONLY_NEW, how.only_new)
            letters = letters + insert_range(connection, insertion, rows)
        insert_dead_letters(connection, part.job, events, letters)
        record_batch_done(connection, part, events.num_rows - len(letters), len(letters))
    return LoadResult(events.num_rows - len(letters), len(letters))


def stage(connection: Connection, rows: pa.Table) -> None:
    """Copy the rows that `split_dead_letters` returns to the temporary table that the statements select from."""
    connection.execute(_STAGE)
    with connection.cursor().copy(_COPY) as copy:
        copy.write(_as_csv(rows))


def insert_dead_letters(connection: Connection, job: str, events: pa.Table, letters: list[DeadLetter]) -> None:
    for letter in letters:
        _insert_dead_letter(connection, job, events.slice(letter.row, 1).to_pylist()[0], letter)


def record_batch_done(connection: Connection, part: BatchPart, events: int, dead: int) -> None:
    connection.execute(_RECORD_BATCH, [part.job, part.query, part.partition, part.batch, events, dead])


def _may_exist(connection: Connection, how: LoadStatements, rows: pa.Table) -> bool:
    """Whether an event of the batch may already be in the table as a row without an incarnation."""
    pairs = rows.select(["stream", "incarnation"]).group_by(["stream", "incarnation"]).aggregate([]).to_pydict()
    incarnations = dict(zip(pairs["stream"], pairs["incarnation"], strict=True))
    if not all(incarnations.values()):
        return True
    decided: dict[str, str] = dict(connection.execute(_DECIDED, [how.table, list(incarnations)]).fetchall())
    undecided = [stream for stream in incarnations if stream not in decided]
    if undecided:
        try:
            with connection.transaction():
                connection.execute(how.adoption.encode(), [undecided, [incarnations[one] for one in undecided]])
        except psycopg.Error as error:
            if not is_row_error(error):
                raise
            # Staged values that cannot be compared with the table are not in it.
            connection.execute(_UNRELATED, [how.table, undecided])
        decided = dict(connection.execute(_DECIDED, [how.table, list(incarnations)]).fetchall())
    return any(decided[stream] == incarnation for stream, incarnation in incarnations.items())


def insert_range(
    connection: Connection, insertion: str, rows: pa.Table, counts: list[int] | None = None
) -> list[DeadLetter]:
    """Run a statement on these staged rows; if a row makes it fail, split them in halves until that row is found.

    The number of rows that each run changed is added to `counts`.
    """
    numbers: list[int] = rows["n"].to_pylist()
    letters: list[DeadLetter] = []
    waiting = [(0, len(numbers) - 1)]
    while waiting:
        first, last = waiting.pop()
        statement = insertion.replace(STAGED_FIRST, str(numbers[first])).replace(STAGED_LAST, str(numbers[last]))
        try:
            with connection.transaction():
                # As bytes, so that no character of a name or path is read as a placeholder.
                done = connection.execute(statement.encode())
            if counts is not None:
                counts.append(done.rowcount)
        except psycopg.Error as error:
            if not is_row_error(error):
                raise
            if first == last:
                letters.append(DeadLetter(numbers[first], _reason(error), _detail(error)))
                continue
            middle = (first + last) // 2
            # The left half runs first, so that rows keep their order.
            waiting += [(middle + 1, last), (first, middle)]
    return letters


def split_dead_letters(events: pa.Table, event_bytes_max: int) -> tuple[list[DeadLetter], pa.Table]:
    """Split events into those that cannot become rows and the others, numbered for staging, without the database."""
    count = events.num_rows
    values = events["value"].combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], pa.binary())
    is_json = pc.match_substring_regex(events["content_type"], r"(?i)^\s*application/json\s*(;|$)")
    too_big = pc.greater(pc.binary_length(values), event_bytes_max)
    texts, invalid = _texts(values)
    is_object = pc.starts_with(pc.ascii_ltrim_whitespace(texts), "{")
    bad = pc.or_(pc.or_(pc.invert(is_json), too_big), pc.or_(invalid, pc.invert(is_object)))
    letters = [
        _invalid_event(number, bool(is_json[number].as_py()), bool(too_big[number].as_py()), event_bytes_max)
        for number in pc.indices_nonzero(bad).to_pylist()
    ]
    rows = pa.table(
        {
            "n": pa.array(range(count), pa.int64()),
            "stream": events["stream"],
            "ds_offset": events["ds_offset"],
            "incarnation": events["incarnation"],
            "position": events["position"],
            "payload": texts,
        }
    )
    return letters, rows.filter(pc.invert(bad)) if letters else rows


def split_offsets(events: pa.Table) -> pa.Table:
    """The events with their offsets in two columns: the first two parts, and the incarnation."""
    offsets = events["offset"].combine_chunks()
    if isinstance(offsets, pa.ChunkedArray):
        offsets = pa.concat_arrays(offsets.chunks) if offsets.num_chunks else pa.array([], pa.string())
    if offsets.null_count:
        # The server does not send the offset of each message; the position also identifies it.
        places = [f"position:{place:016x}" for place in events["position"].to_pylist()]
        offsets = pc.if_else(pc.is_null(offsets), pa.array(places), offsets)
    has_incarnation = pc.match_substring_regex(offsets, _WITH_INCARNATION)
    places = pc.if_else(has_incarnation, pc.utf8_slice_codeunits(offsets, 0, _PLACE_LENGTH), offsets)
    incarnations = pc.if_else(has_incarnation, pc.utf8_slice_codeunits(offsets, _PLACE_LENGTH + 1), "")
    return events.append_column("ds_offset", places).append_column("incarnation", incarnations)


def _texts(values: pa.BinaryArray) -> tuple[pa.StringArray, pa.BooleanArray]:
    """The values as text, and which of them are not UTF-8."""
    try:
        return pc.cast(values, pa.string()), pa.repeat(pa.scalar(False), len(values))
    except pa.ArrowInvalid:
        texts: list[str] = []
        invalid: list[bool] = []
        for value in values.to_pylist():
            try:
                texts.append(value.decode())
                invalid.append(False)
            except UnicodeDecodeError:
                texts.append("")
                invalid.append(True)
        return pa.array(texts, pa.string()), pa.array(invalid)


def _invalid_event(number: int, is_json: bool, too_big: bool, event_bytes_max: int) -> DeadLetter:
    if not is_json:
        return DeadLetter(number, "not-json", "The stream's content type is not application/json.")
    if too_big:
        return DeadLetter(number, "too-big", f"The event has more than {event_bytes_max} bytes.")
    return DeadLetter(number, "not-an-object", "The event is not a JSON object, so it has no fields.")


def _reason(error: psycopg.Error) -> str:
    return "constraint" if isinstance(error, psycopg.IntegrityError) else "refused"


def _detail(error: psycopg.Error) -> str:
    parts = [str(error.sqlstate), error.diag.message_primary or str(error), error.diag.message_detail or ""]
    return " ".join(part for part in parts if part)[:_DETAIL_MAX]


def _insert_dead_letter(connection: Connection, job: str, event: dict[str, object], letter: DeadLetter) -> None:
    values = {name: event[name] for name in ("stream", "incarnation", "content_type", "value")}
    letter_values = {"job": job, "offset": event["ds_offset"], "reason": letter.reason, "detail": letter.detail}
    connection.execute(_INSERT_DEAD_LETTER, values | letter_values)


def _as_csv(rows: pa.Table) -> bytes:
    out = io.BytesIO()
    pyarrow.csv.write_csv(rows, out, _CSV)
    return out.getvalue()
