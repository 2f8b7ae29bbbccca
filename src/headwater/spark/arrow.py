"""Convert messages to Arrow batches: the columns of a schema, and how each is filled.

Invariant: well-formed data is converted with buffers and numpy, without a Python object per message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from headwater.spark.columns import METADATA, STATE
from headwater.spark.errors import HeadwaterError, OptionError
from headwater.spark.message_runs import MessageRun
from headwater.spark.options import BadRecords
from headwater.spark.state_messages import headers_of, keys_of
from headwater.spark.typed import TypedParser

CORRUPT: Final = "_corrupt"


class Layout:
    """The columns of a query, and how each is filled."""

    def __init__(self, schema: StructType, prefix: str, bad_records: BadRecords, *, with_headers: bool = False) -> None:
        self._made_of = (schema, prefix, bad_records, with_headers)
        kinds = METADATA | ({name: (type_,) for name, type_ in STATE.items()} if with_headers else {})
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._metadata: dict[str, str] = {}
        typed: list[StructField] = []
        has_corrupt = False
        for column in schema.fields:
            name = column.name
            ours = name.removeprefix(prefix) if name.startswith(prefix) else ""
            if name == CORRUPT:
                has_corrupt = True
                if not isinstance(column.dataType, StringType):
                    raise OptionError(f"The column {CORRUPT} must be a string.")
            elif ours in kinds:
                if column.dataType not in kinds[ours]:
                    raise OptionError(
                        f"The column {name} is {' or '.join(one.simpleString() for one in kinds[ours])}, not"
                        f" {column.dataType.simpleString()}. If it is a field of the JSON messages, set"
                        " metadataPrefix to give the metadata columns other names."
                    )
                self._metadata[name] = ours
            else:
                typed.append(column)
        if has_corrupt and not typed:
            raise OptionError(f"The column {CORRUPT} needs columns for fields of the messages beside it.")
        self._parser = TypedParser(StructType(typed), has_corrupt, bad_records) if typed else None

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[StructType, str, BadRecords, bool]]:
        """Pickle the arguments, because parsers cannot be pickled."""
        return _layout, self._made_of

    @property
    def has_times(self) -> bool:
        """Whether the arrival time is one of the columns."""
        return "timestamp" in self._metadata.values()

    def batch(self, messages: MessageRun) -> pa.RecordBatch:
        count = len(messages)
        filled: dict[str, pa.Array] = {}
        if self._parser is not None:
            filled = self._parser.nulls(count) if messages.snapshot else self._parser.parse(messages)
        for name, ours in self._metadata.items():
            filled[name] = self._column(ours, messages, self._schema.field(name).type)
        return pa.RecordBatch.from_arrays([filled[name] for name in self._schema.names], schema=self._schema)

    def _column(self, name: str, messages: MessageRun, type_: pa.DataType) -> pa.Array:
        count = len(messages)
        match name:
            case "value":
                return _value(messages, type_)
            case "offset":
                return messages.ends
            case "position":
                first = messages.first_position
                return pa.array(np.arange(first, first + count, dtype=np.int64))
            case "stream":
                return pa.repeat(pa.scalar(messages.stream), count)
            case "timestamp":
                return _timestamps(messages, type_)
            case "key":
                return keys_of(messages)
            case "headers":
                return headers_of(messages)
            case "content_type":
                return pa.repeat(pa.scalar(messages.content_type), count)
            case _:
                return pa.repeat(pa.scalar(messages.snapshot), count)


def _layout(schema: StructType, prefix: str, bad_records: BadRecords, with_headers: bool) -> Layout:
    return Layout(schema, prefix, bad_records, with_headers=with_headers)


def _timestamps(messages: MessageRun, type_: pa.DataType) -> pa.Array:
    """When each message arrived; null if the server does not know."""
    if messages.times_ms is None:
        return pa.nulls(len(messages), type_)
    return pa.array(messages.times_ms, pa.timestamp("ms", "UTC"), mask=messages.times_ms == 0).cast(type_)


def _value(messages: MessageRun, type_: pa.DataType) -> pa.Array:
    if type_ == pa.binary():
        return messages.values
    try:
        return pc.cast(messages.values, pa.string())
    except pa.ArrowInvalid as error:
        raise HeadwaterError(
            f"Stream {messages.stream!r} ({messages.content_type}), message {messages.first_position} and following"
            f" (offset {messages.start_offset or 'unknown'}): not text in UTF-8. Set valueType=binary,"
            " or give value the type binary in the schema."
        ) from error
