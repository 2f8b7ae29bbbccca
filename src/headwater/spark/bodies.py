"""Rows to appends: the rows of a task, grouped by target, in a stated order, as the bytes of requests.

Invariant: what comes out depends on the rows and their order alone. With a sort key it depends on the rows alone, and a
key that is not unique is refused, because then the order of a retry could differ.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.spark.arrow import split_json
from headwater.spark.errors import BadRow
from headwater.spark.options import SinkOptions

_TARGET: Final = "__target"
_VALUE: Final = "__value"
_SHOWN_BYTES: Final = 200

_encode: Final = msgspec.json.Encoder(decimal_format="number", uuid_format="canonical").encode


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The rows of one target, in the order in which they are to be appended."""

    stream: str
    values: pa.Array
    bytes: int


def rows_table(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> pa.Table | None:
    """The rows of a task: target, value as bytes, and the columns to sort by. None if there are none."""
    tables = [_picked(options, batch) for batch in batches if batch.num_rows]
    return pa.concat_tables(tables) if tables else None


def grouped(options: SinkOptions, rows: pa.Table) -> Iterator[TargetRows]:
    """Target by target; within one by the sort key, or as the rows came."""
    if options.order_by:
        keys = [(_TARGET, "ascending")] + [(_key(name), "ascending") for name in options.order_by]
        rows = rows.take(pc.sort_indices(rows, sort_keys=keys))
        _check_unique(options, rows)
    elif pc.count_distinct(rows[_TARGET]).as_py() > 1:
        # Arrow's sort is not stable, so the number of a row is part of the key.
        rows = rows.append_column("__row", pa.array(range(rows.num_rows)))
        rows = rows.take(pc.sort_indices(rows, sort_keys=[(_TARGET, "ascending"), ("__row", "ascending")]))
    targets = rows[_TARGET].combine_chunks()
    values = rows[_VALUE].combine_chunks()
    runs = pc.run_end_encode(targets)
    at = 0
    for stream, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        part = values.slice(at, end - at)
        yield TargetRows(stream, part, pc.sum(pc.binary_length(part)).as_py() + len(part) + 1)
        at = end


def json_bodies(target: TargetRows, bytes_max: int) -> Iterator[bytes]:
    """Appends of many messages each: as few as fit, cut by size alone."""
    for part in _pieces(target, bytes_max):
        body = b"[" + _joined(part, b",") + b"]"
        _check_json(target.stream, part, body)
        yield body


def line_body(target: TargetRows) -> bytes:
    """One message, a line for each row."""
    return _joined(target.values, b"\n") + b"\n"


def _pieces(target: TargetRows, bytes_max: int) -> Iterator[pa.Array]:
    if target.bytes <= bytes_max:
        yield target.values
        return
    lengths = pc.binary_length(target.values).to_pylist()
    start, size = 0, 2
    for at, length in enumerate(lengths):
        if length + 2 > bytes_max:
            raise BadRow(f"A row for stream {target.stream!r} has {length} bytes; maxRequestBytes is {bytes_max}.")
        if size + length + 1 > bytes_max:
            yield target.values.slice(start, at - start)
            start, size = at, 2
        size += length + 1
    yield target.values.slice(start)


def _joined(values: pa.Array, separator: bytes) -> bytes:
    whole = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    joined: bytes = pc.binary_join(whole, pa.scalar(separator, pa.binary()))[0].as_py()
    return joined


def _check_json(stream: str, values: pa.Array, body: bytes) -> None:
    """As many JSON texts as rows: a row like `1,2` would be two messages, one like `{` would spoil its neighbours."""
    try:
        if len(split_json(body)) == len(values):
            return
    except (msgspec.DecodeError, RecursionError):
        pass
    for at, value in enumerate(values.to_pylist()):
        try:
            msgspec.json.decode(value, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = value[:_SHOWN_BYTES].decode("utf-8", "replace")
            raise BadRow(
                f"Row {at} for stream {stream!r} is not one JSON text ({error}): {shown!r}. Make it one with"
                " to_json(struct(…)), or set contentType to that of a stream that is not JSON."
            ) from error
    raise BadRow(f"The rows for stream {stream!r} are not one JSON text each.")


def _check_unique(options: SinkOptions, rows: pa.Table) -> None:
    """Rows are sorted: equal keys are neighbours."""
    if rows.num_rows < 2:
        return
    same = None
    for name in (_TARGET, *map(_key, options.order_by)):
        column = rows[name].combine_chunks()
        equal = pc.fill_null(pc.equal(column.slice(1), column.slice(0, len(column) - 1)), False)
        same = equal if same is None else pc.and_(same, equal)
    if pc.any(same).as_py():
        at = pc.index(same, True).as_py()
        key = {name: rows[_key(name)][at].as_py() for name in options.order_by}
        raise BadRow(
            f"orderBy must be unique within a target, but stream {rows[_TARGET][at].as_py()!r} has two rows with {key}."
        )


def _picked(options: SinkOptions, batch: pa.RecordBatch) -> pa.Table:
    targets = _targets(options, batch)
    columns = {_TARGET: targets, _VALUE: as_bytes(options, _column(batch, options.value_column))}
    for name in options.order_by:
        columns[_key(name)] = _column(batch, name)
    return pa.table(columns)


def _targets(options: SinkOptions, batch: pa.RecordBatch) -> pa.Array:
    if options.stream:
        return pa.repeat(pa.scalar(options.stream), batch.num_rows)
    if options.stream_column not in batch.schema.names:
        raise BadRow(
            f"Where to? Set the option stream, or add a column {options.stream_column} that names each row's target."
        )
    column = batch.column(options.stream_column)
    if column.null_count:
        raise BadRow(f"A row has no target: its column {options.stream_column} is null.")
    return column


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    if name not in batch.schema.names:
        raise BadRow(f"There is no column {name}; there are {', '.join(batch.schema.names)}.")
    return batch.column(name)


def as_bytes(options: SinkOptions, column: pa.Array) -> pa.Array:
    """What is appended for each value."""
    if column.null_count:
        raise BadRow(f"The column {options.value_column} is null in {column.null_count} rows; leave them out before.")
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return column.cast(pa.binary())
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return column.cast(pa.binary())
    if not options.is_json:
        raise BadRow(
            f"The column {options.value_column} is {kind}; for {options.content_type} it must be a string or binary."
        )
    return pa.array([_encode(_plain(value)) for value in column.to_pylist()], pa.binary())


def _plain(value: Any) -> Any:
    """Arrow's Python values as JSON has them; a map comes as a list of pairs."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(one, tuple) for one in value):
            return {str(key): _plain(one) for key, one in value}
        return [_plain(one) for one in value]
    if isinstance(value, float) and value != value:  # noqa: PLR0124 - NaN, which JSON does not have
        return None
    return value if not isinstance(value, dt.timedelta | decimal.Decimal) else _spelled(value)


def _spelled(value: dt.timedelta | decimal.Decimal) -> Any:
    return value.total_seconds() if isinstance(value, dt.timedelta) else value


def _key(name: str) -> str:
    return f"key:{name}"
