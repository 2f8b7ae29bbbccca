"""Filter pushdown for batch reads: read only the streams and positions that the filters of a query can accept.

Spark raises an error for a reader with `pushFilters` in sessions where pushdown is off, which is Spark's default. It
calls `pushFilters` in a separate process, so only that process gets a reader that has it. Invariant: all filters are
returned to Spark, which applies them too, so a range may include more than the filters accept, but never less.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import (
    ColumnPath,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from headwater.spark.reader import BatchReader, RowRange

_PUSHDOWN_PROCESS: Final = "pyspark.sql.worker.data_source_pushdown_filters"


def is_pushdown_process() -> bool:
    """Whether Spark runs this process to push filters."""
    return _PUSHDOWN_PROCESS in sys.modules


class FilteringBatchReader(BatchReader):
    """A batch reader that reads only what the filters can accept."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self.row_range = row_range(filters, self._options.metadata_prefix)
        return filters


@dataclass(slots=True)
class _Bounds:
    streams: frozenset[str] | None = None
    prefix: str = ""
    first: int = 0
    end: float = float("inf")

    def among(self, streams: Iterable[str]) -> None:
        found = frozenset(streams)
        self.streams = found if self.streams is None else self.streams & found


def row_range(filters: Iterable[Filter], metadata_prefix: str = "") -> RowRange:
    """The range of rows that all of these filters together can accept."""
    bounds = _Bounds()
    stream, position = (metadata_prefix + "stream",), (metadata_prefix + "position",)
    for one in filters:
        match one:
            case EqualTo(attribute=column, value=str(name)) if column == stream:
                bounds.among([name])
            case In(attribute=column, value=names) if column == stream:
                bounds.among(names)
            case StringStartsWith(attribute=column, value=str(prefix)) if column == stream:
                bounds.prefix = max(bounds.prefix, prefix, key=len)
            case _:
                _narrow(bounds, one, position)
    return RowRange(bounds.streams, bounds.prefix, bounds.first, bounds.end)


def _narrow(bounds: _Bounds, one: Filter, position: ColumnPath) -> None:
    match one:
        case EqualTo(attribute=column, value=int(at)) if column == position:
            bounds.first, bounds.end = max(bounds.first, at), min(bounds.end, at + 1)
        case GreaterThan(attribute=column, value=int(at)) if column == position:
            bounds.first = max(bounds.first, at + 1)
        case GreaterThanOrEqual(attribute=column, value=int(at)) if column == position:
            bounds.first = max(bounds.first, at)
        case LessThan(attribute=column, value=int(at)) if column == position:
            bounds.end = min(bounds.end, at)
        case LessThanOrEqual(attribute=column, value=int(at)) if column == position:
            bounds.end = min(bounds.end, at + 1)
