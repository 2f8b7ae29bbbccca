"""Convert rows to request bodies: group the rows of a task by target, sort them and encode them.

Invariant: the result depends only on the rows and their order. With a sort key it depends only on the rows; if tasks
append their own rows, a key that is not unique is an error, because the order of a retry could then differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.spark.errors import BadRowError
from headwater.spark.json_values import encode_json, plain
from headwater.spark.message_runs import split_json
from headwater.spark.options import Framing, SinkOptions
from headwater.spark.state_messages import RESET, state_values

_TARGET: Final = "__target"
_VALUE: Final = "__value"
_SHOWN_BYTES: Final = 200

_TEXT_TYPES: Final = (
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_large_string,
    pa.types.is_large_binary,
)


class TargetRows:
    """The rows of one target, in the order in which they will be appended."""

    __slots__ = ("_sums", "stream", "values")

    def __init__(self, stream: str, values: pa.Array) -> None:
        self.stream = stream
        self.values = values
        lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
        self._sums = np.zeros(len(values) + 1, np.int64)
        """The bytes before each row, with one byte for the separator after each."""
        np.cumsum(lengths.astype(np.int64) + 1, out=self._sums[1:])

    def __len__(self) -> int:
        return len(self.values)

    @property
    def bytes(self) -> int:
        """The size of all rows in one body."""
        return int(self._sums[-1]) + 1

    def size(self, start: int, end: int) -> int:
        """The bytes of these rows, with a separator after each."""
        return int(self._sums[end] - self._sums[start])

    def last_fitting(self, start: int, size: int) -> int:
        """The end of the longest run of rows from `start` whose size is at most `size`."""
        return int(np.searchsorted(self._sums, self._sums[start] + size, "right")) - 1


def rows_table(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> pa.Table | None:
    """The rows of a task: target, value as bytes, and the columns to sort by; None without rows."""
    tables = [_picked(options, batch) for batch in batches if batch.num_rows]
    return pa.concat_tables(tables) if tables else None


def with_reset(options: SinkOptions, rows: pa.Table) -> pa.Table:
    """The rows, preceded by a message that makes readers discard all earlier rows."""
    first = pa.table({_TARGET: [options.stream], _VALUE: pa.array([RESET], pa.binary())})
    return pa.concat_tables([first.cast(rows.schema), rows])


def grouped(options: SinkOptions, rows: pa.Table) -> Iterator[TargetRows]:
    """The rows of each target, sorted by the sort key if there is one, otherwise in the given order."""
    if options.order_by:
        keys = [(_TARGET, "ascending")] + [(_key(name), "ascending") for name in options.order_by]
        rows = rows.take(pc.sort_indices(rows, sort_keys=keys))
        if options.commit_mode == "task":
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
        yield TargetRows(stream, values.slice(at, end - at))
        at = end


_OVERHEAD_BYTES: Final = {"json": 1, "lines": 0, "message": -1}
"""The length of a body minus that of its rows with a separator after each. A JSON array has two brackets and no last
comma; a single message has no separator."""


def append_end(target: TargetRows, start: int, framing: Framing, bytes_max: int) -> int:
    """The end of the rows of the append that begins with row `start`: as many as fit."""
    if framing == "message":
        return start + 1
    end = target.last_fitting(start, bytes_max - _OVERHEAD_BYTES[framing])
    if end <= start:
        size = target.size(start, start + 1) - 1
        raise BadRowError(f"A row for stream {target.stream!r} has {size} bytes; maxRequestBytes is {bytes_max}.")
    return end


def append_body(target: TargetRows, start: int, end: int, framing: Framing) -> bytes:
    """The body of an append of these rows."""
    rows = target.values.slice(start, end - start)
    if framing == "message":
        message: bytes = rows[0].as_py()
        return message
    if framing == "lines":
        return _joined(rows, b"\n") + b"\n"
    return b"[" + _joined(rows, b",") + b"]"


def rows_of_body(target: TargetRows, start: int, framing: Framing, length: int) -> int | None:
    """The end of the rows from `start` that make a body of this length, or None if there are none."""
    size = length - _OVERHEAD_BYTES[framing]
    end = target.last_fitting(start, size)
    return end if start < end and target.size(start, end) == size else None


def _joined(values: pa.Array, separator: bytes) -> bytes:
    whole = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    joined: bytes = pc.binary_join(whole, pa.scalar(separator, pa.binary()))[0].as_py()
    return joined


def _check_json(targets: pa.Array, values: pa.Array) -> None:
    """Check that each row is one JSON text: `1,2` would become two messages, and `{` would break the whole body."""
    try:
        if len(split_json(b"[" + _joined(values, b",") + b"]")) == len(values):
            return
    except (msgspec.DecodeError, RecursionError):
        pass
    for at, value in enumerate(values.to_pylist()):
        try:
            msgspec.json.decode(value, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = value[:_SHOWN_BYTES].decode("utf-8", "replace")
            raise BadRowError(
                f"Row {at} for stream {targets[at].as_py()!r} is not one JSON text ({error}): {shown!r}. Make it one"
                " with to_json(struct(…)), or set contentType to that of a stream that is not JSON."
            ) from error
    raise BadRowError(f"The rows for stream {targets[0].as_py()!r} are not one JSON text each.")


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
        raise BadRowError(
            f"orderBy must be unique within a target, but stream {rows[_TARGET][at].as_py()!r} has two rows with {key}."
        )


def _picked(options: SinkOptions, batch: pa.RecordBatch) -> pa.Table:
    targets = _targets(options, batch)
    if options.key_columns:
        values = state_values(options, batch, targets)
    else:
        column = _column(batch, options.value_column)
        values = as_bytes(options, column)
        if options.is_json and _is_text(column.type):
            _check_json(targets, values)
    columns = {_TARGET: targets, _VALUE: values}
    for name in options.order_by:
        columns[_key(name)] = _column(batch, name)
    return pa.table(columns)


def _targets(options: SinkOptions, batch: pa.RecordBatch) -> pa.Array:
    if options.stream:
        return pa.repeat(pa.scalar(options.stream), batch.num_rows)
    if options.stream_column not in batch.schema.names:
        raise BadRowError(
            f"The rows have no target: set the option stream, or add a column {options.stream_column} with its name."
        )
    column = batch.column(options.stream_column)
    if column.null_count:
        raise BadRowError(f"A row has no target: its column {options.stream_column} is null.")
    return column


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    if name not in batch.schema.names:
        raise BadRowError(f"There is no column {name}; the columns are {', '.join(batch.schema.names)}.")
    return batch.column(name)


def as_bytes(options: SinkOptions, column: pa.Array) -> pa.Array:
    """The bytes to append for each value."""
    if column.null_count:
        raise BadRowError(
            f"The column {options.value_column} is null in {column.null_count} rows; filter them out first."
        )
    if _is_text(column.type):
        return column.cast(pa.binary())
    if not options.is_json:
        raise BadRowError(
            f"The column {options.value_column} is {column.type}; for {options.content_type} it must be a string or"
            " binary."
        )
    return pa.array([encode_json(plain(value)) for value in column.to_pylist()], pa.binary())


def _is_text(kind: pa.DataType) -> bool:
    return any(is_one(kind) for is_one in _TEXT_TYPES)


def _key(name: str) -> str:
    return f"key:{name}"
