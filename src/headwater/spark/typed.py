"""Convert JSON messages to typed columns: with Arrow's parser, or one by one if a message of the run does not fit.

Invariant: both ways give the same values. A message is corrupt if it is not a JSON object or a field does not fit its
type. A missing field is null, an unknown one is ignored, and a string column accepts any JSON value as its text.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import decimal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from headwater.spark.errors import BadRecordError, OptionError
from headwater.spark.options import BadRecords

if TYPE_CHECKING:
    from headwater.spark.message_runs import MessageRun

Convert = Callable[[msgspec.Raw], Any]

_SHOWN_BYTES: Final = 200
_PLAIN: Final = (
    spark.StringType,
    spark.BooleanType,
    spark.ByteType,
    spark.ShortType,
    spark.IntegerType,
    spark.LongType,
    spark.DoubleType,
)
"""Types that Arrow's parser returns directly."""
_BY_CAST: Final = (spark.TimestampType, spark.TimestampNTZType, spark.DateType)
"""Types that it parses as text, which is then cast."""


class SchemaMismatchError(ValueError):
    """A JSON value does not fit the type of its column."""


class TypedParser:
    def __init__(self, schema: spark.StructType, has_corrupt: bool, bad_records: BadRecords) -> None:
        self._names = schema.fieldNames()
        self._arrow = to_arrow_schema(schema, timezone="UTC")
        self._has_corrupt = has_corrupt
        self._bad_records = bad_records
        self._converters: dict[str, Convert] = {field.name: _converter(field.dataType) for field in schema.fields}
        self._fast = _fast_schema(schema)

    def nulls(self, count: int) -> dict[str, pa.Array]:
        filled = {name: pa.nulls(count, self._arrow.field(name).type) for name in self._names}
        if self._has_corrupt:
            filled["_corrupt"] = pa.nulls(count, pa.string())
        return filled

    def parse(self, messages: MessageRun) -> dict[str, pa.Array]:
        parsed = self._parse_together(messages) if self._fast is not None else None
        return parsed if parsed is not None else self._parse_one_by_one(messages)

    def _parse_together(self, messages: MessageRun) -> dict[str, pa.Array] | None:
        """Parse all messages at once; None if one of them does not fit."""
        count = len(messages)
        lines = _as_lines(messages.stored, messages.separated)
        if lines is None:
            return None
        try:
            table = pyarrow.json.read_json(
                pa.BufferReader(lines),
                read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=lines.size + 1),
                parse_options=pyarrow.json.ParseOptions(explicit_schema=self._fast, unexpected_field_behavior="ignore"),
            )
            if table.num_rows != count:
                return None
            filled = {}
            for name in self._names:
                column = table.column(name).combine_chunks()
                target = self._arrow.field(name).type
                filled[name] = column if column.type == target else pc.cast(column, target)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None
        if self._has_corrupt:
            filled["_corrupt"] = pa.nulls(count, pa.string())
        return filled

    def _parse_one_by_one(self, messages: MessageRun) -> dict[str, pa.Array]:
        columns: dict[str, list[Any]] = {name: [] for name in self._names}
        corrupt: list[str | None] = []
        fields = self._converters.items()
        for at, value in enumerate(messages.values):
            raw = value.as_buffer().to_pybytes()
            try:
                record = _object(msgspec.Raw(raw))
                row = [convert(record[name]) if name in record else None for name, convert in fields]
                bad = None
            except (SchemaMismatchError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                bad = raw.decode("utf-8", "replace")
                if not self._has_corrupt and self._bad_records == "fail":
                    end = messages.ends[at].as_py() or "unknown"
                    raise BadRecordError(
                        f"Stream {messages.stream!r}, message {messages.first_position + at} (offset after it: {end}):"
                        f" {error}. Add a column `_corrupt string` to the schema, or set badRecords=null. It begins:"
                        f" {bad[:_SHOWN_BYTES]}"
                    ) from error
                row = [None] * len(self._names)
            for column, cell in zip(columns.values(), row, strict=True):
                column.append(cell)
            corrupt.append(bad)
        filled = {name: pa.array(column, self._arrow.field(name).type) for name, column in columns.items()}
        if self._has_corrupt:
            filled["_corrupt"] = pa.array(corrupt, pa.string())
        return filled


def _as_lines(stored: pa.BinaryArray, separated: bool) -> pa.Buffer | None:
    """The messages as lines. Line feeds within them become spaces, because JSON has none in strings.

    None if one of them does not look like an object: Arrow would read a `null` as an object without fields.
    """
    if not separated:
        separator = pa.scalar(b",", pa.binary())
        stored = pc.binary_join_element_wise(stored, pa.scalar(b"", pa.binary()), separator)
    _, bounds_buffer, data_buffer = stored.buffers()
    bounds = np.frombuffer(bounds_buffer, np.int32, len(stored) + 1, 4 * stored.offset)
    lines = np.frombuffer(data_buffer, np.uint8)[bounds[0] : bounds[-1]].copy()
    if not np.all(lines[bounds[:-1] - bounds[0]] == ord("{")):
        return None
    lines[lines == 10] = 32
    lines[bounds[1:] - bounds[0] - 1] = 10
    return pa.py_buffer(lines)


def _fast_schema(schema: spark.StructType) -> pa.Schema | None:
    """The schema for Arrow's parser, or None if it does not support these types."""
    fields = []
    arrow = to_arrow_schema(schema, timezone="UTC")
    for field in schema.fields:
        if isinstance(field.dataType, _BY_CAST):
            fields.append(pa.field(field.name, pa.string()))
        elif _is_plain(field.dataType):
            fields.append(pa.field(field.name, arrow.field(field.name).type))
        else:
            return None
    return pa.schema(fields)


def _is_plain(type_: spark.DataType) -> bool:
    if isinstance(type_, spark.ArrayType):
        return _is_plain(type_.elementType)
    if isinstance(type_, spark.StructType):
        return all(_is_plain(field.dataType) for field in type_.fields)
    return isinstance(type_, _PLAIN)


# -- one value at a time --------------------------------------------------------------------------------------------

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode
_truth = msgspec.json.Decoder(bool).decode
_number = msgspec.json.Decoder(float).decode
_exact = msgspec.json.Decoder(decimal.Decimal, float_hook=decimal.Decimal).decode
_whole = msgspec.json.Decoder(int).decode


def _converter(type_: spark.DataType) -> Convert:
    """A function that converts a JSON value to this type; null stays null in every type."""
    convert = _converter_of_values(type_)
    return lambda raw: None if bytes(raw) == b"null" else convert(raw)


def _converter_of_values(type_: spark.DataType) -> Convert:
    if isinstance(type_, spark.IntegralType):
        bits = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}[type_.simpleString()]
        return lambda raw: _ranged(raw, bits)
    if isinstance(type_, spark.DecimalType):
        precision, scale = type_.precision, type_.scale
        return lambda raw: _decimal(raw, precision, scale)
    if isinstance(type_, spark.ArrayType):
        element = _converter(type_.elementType)
        return lambda raw: [element(one) for one in _array(raw)]
    if isinstance(type_, spark.MapType):
        if not isinstance(type_.keyType, spark.StringType):
            raise OptionError(f"The keys of a map column must be strings, not {type_.keyType.simpleString()}.")
        value = _converter(type_.valueType)
        return lambda raw: [(key, value(one)) for key, one in _object(raw).items()]
    if isinstance(type_, spark.StructType):
        fields = [(field.name, _converter(field.dataType)) for field in type_.fields]
        return lambda raw: _struct(_object(raw), fields)
    for kind, convert in _CONVERTERS.items():
        if isinstance(type_, kind):
            return convert
    raise OptionError(f"A column of type {type_.simpleString()} cannot be read from JSON.")


def _as_text(raw: msgspec.Raw) -> str:
    spelled = bytes(raw)
    return _text(raw) if spelled[:1] == b'"' else spelled.decode()


def _ranged(raw: msgspec.Raw, bits: int) -> int:
    if not bytes(raw).lstrip(b"-").isdigit():
        raise SchemaMismatchError(f"{_short(raw)} is not a whole number")
    value = _whole(raw)
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise SchemaMismatchError(f"{value} does not fit {bits} bits")
    return value


def _decimal(raw: msgspec.Raw, precision: int, scale: int) -> decimal.Decimal:
    value = _exact(raw)
    if not value.is_finite():
        raise SchemaMismatchError(f"{_short(raw)} is not a number")
    quantised = value.quantize(decimal.Decimal(1).scaleb(-scale), context=decimal.Context(prec=76))
    if quantised != value or len(quantised.as_tuple().digits) > precision:
        raise SchemaMismatchError(f"{_short(raw)} does not fit decimal({precision},{scale})")
    return quantised


def _struct(record: dict[str, msgspec.Raw], fields: list[tuple[str, Convert]]) -> dict[str, Any]:
    return {name: convert(record[name]) if name in record else None for name, convert in fields}


def _instant(raw: msgspec.Raw) -> dt.datetime:
    value: dt.datetime = _parsed(raw, dt.datetime.fromisoformat)
    return value.replace(tzinfo=dt.UTC) if value.tzinfo is None else value.astimezone(dt.UTC)


def _wall_clock(raw: msgspec.Raw) -> dt.datetime:
    value: dt.datetime = _parsed(raw, dt.datetime.fromisoformat)
    if value.tzinfo is not None:
        raise SchemaMismatchError(f"{_short(raw)} has a time zone, and the column has none")
    return value


def _parsed(raw: msgspec.Raw, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(_text(raw))
    except ValueError as error:
        raise SchemaMismatchError(f"{_short(raw)} is not of the column's type") from error


def _bytes(raw: msgspec.Raw) -> bytes:
    try:
        return base64.b64decode(_text(raw), validate=True)
    except binascii.Error as error:
        raise SchemaMismatchError(f"{_short(raw)} is not valid base64") from error


def _short(raw: msgspec.Raw) -> str:
    return bytes(raw)[:60].decode("utf-8", "replace")


_CONVERTERS: Final[dict[type[spark.DataType], Convert]] = {
    spark.StringType: _as_text,
    spark.BooleanType: _truth,
    spark.FractionalType: _number,
    spark.TimestampType: _instant,
    spark.TimestampNTZType: _wall_clock,
    spark.DateType: lambda raw: _parsed(raw, dt.date.fromisoformat),
    spark.BinaryType: _bytes,
}
