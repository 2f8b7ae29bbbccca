"""JSON to typed columns: valid and invalid values, and that both ways of parsing agree."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from headwater.spark.arrow import Layout
from headwater.spark.errors import BadRecordError, OptionError
from headwater.spark.message_runs import MessageRun, from_values


def struct(**columns: DataType) -> StructType:
    return StructType([StructField(name, type_) for name, type_ in columns.items()])


def messages(*values: bytes) -> MessageRun:
    return from_values("s", "application/json", values, 0, None)


def parsed(schema: StructType, *values: bytes, bad_records: Any = "fail") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = Layout(schema, "", bad_records).batch(messages(*values)).to_pylist()
    return rows


def one(type_: DataType, text: str) -> Any:
    (row,) = parsed(struct(x=type_, _corrupt=StringType()), f'{{"x": {text}}}'.encode())
    assert row["_corrupt"] is None, f"{text} does not fit {type_.simpleString()}"
    return row["x"]


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (LongType(), "9223372036854775807", 2**63 - 1),
        (IntegerType(), "-5", -5),
        (DoubleType(), "1", 1.0),
        (DoubleType(), "1e3", 1000.0),
        (BooleanType(), "true", True),
        (StringType(), '"a\\nb"', "a\nb"),
        (StringType(), "12.50", "12.50"),
        (StringType(), '{"a": [1, 2]}', '{"a": [1, 2]}'),
        (StringType(), "null", None),
        (DecimalType(10, 2), "12.50", Decimal("12.50")),
        (DecimalType(10, 2), '"3.1"', Decimal("3.10")),
        (BinaryType(), '"aGk="', b"hi"),
        (DateType(), '"2024-02-29"', dt.date(2024, 2, 29)),
        (TimestampType(), '"2024-01-01T10:00:00Z"', dt.datetime(2024, 1, 1, 10, tzinfo=dt.UTC)),
        (TimestampType(), '"2024-01-01T10:00:00.5+02:00"', dt.datetime(2024, 1, 1, 8, 0, 0, 500000, tzinfo=dt.UTC)),
        (TimestampNTZType(), '"2024-01-01T10:00:00"', dt.datetime(2024, 1, 1, 10)),  # noqa: DTZ001
        (ArrayType(LongType()), "[1, null, 3]", [1, None, 3]),
        (MapType(StringType(), LongType()), '{"a": 1, "b": null}', [("a", 1), ("b", None)]),
        (struct(a=LongType(), b=StringType()), '{"a": 1, "c": 5}', {"a": 1, "b": None}),
    ],
    ids=lambda value: value.simpleString() if isinstance(value, DataType) else None,
)
def test_values_that_fit(type_: DataType, text: str, value: Any) -> None:
    assert one(type_, text) == value


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (LongType(), '"5"'),
        (LongType(), "1.5"),
        (LongType(), "9223372036854775808"),
        (IntegerType(), "2147483648"),
        (DoubleType(), '"1"'),
        (BooleanType(), "1"),
        (DecimalType(4, 2), "123.45"),
        (BinaryType(), '"not base64!"'),
        (DateType(), '"yesterday"'),
        (TimestampType(), '"soon"'),
        (ArrayType(LongType()), "5"),
        (ArrayType(LongType()), '["x"]'),
        (struct(a=LongType()), '{"a": "x"}'),
        (MapType(StringType(), LongType()), "[]"),
    ],
    ids=lambda value: value.simpleString() if isinstance(value, DataType) else None,
)
def test_values_that_do_not_fit_make_the_record_corrupt(type_: DataType, text: str) -> None:
    good = b'{"y": 1}'
    bad = f'{{"x": {text}, "y": 2}}'.encode()
    rows = parsed(struct(x=type_, y=LongType(), _corrupt=StringType()), good, bad, good)
    assert rows[0] == rows[2] == {"x": None, "y": 1, "_corrupt": None}
    assert rows[1] == {"x": None, "y": None, "_corrupt": bad.decode()}


@pytest.mark.parametrize("bad", [b"5", b"null", b"[1]", b'"text"', b"{", b"not json", b'{"a": 1} {"a": 2}'])
def test_value_that_is_not_an_object_is_corrupt(bad: bytes) -> None:
    rows = parsed(struct(a=LongType(), _corrupt=StringType()), b'{"a": 1}', bad)
    assert rows == [{"a": 1, "_corrupt": None}, {"a": None, "_corrupt": bad.decode()}]


def test_corrupt_record_fails_without_a_column_for_it() -> None:
    with pytest.raises(BadRecordError, match=r"'s', message 1 \(offset after it: .*\): .* badRecords=null"):
        parsed(struct(a=LongType()), b'{"a": 1}', b'{"a": "x"}')


def test_corrupt_record_is_null_on_request() -> None:
    assert parsed(struct(a=LongType()), b'{"a": "x"}', bad_records="null") == [{"a": None}]


def test_metadata_columns_may_be_among_the_fields() -> None:
    rows = parsed(struct(a=LongType(), position=LongType(), value=BinaryType()), b'{"a": 7}')
    assert rows == [{"a": 7, "position": 0, "value": b'{"a": 7}'}]


def test_a_field_named_like_one_of_our_columns_needs_a_prefix() -> None:
    with pytest.raises(OptionError, match="metadataPrefix"):
        Layout(struct(value=LongType()), "", "fail")
    layout = Layout(struct(value=LongType(), _value=StringType()), "_", "fail")
    assert layout.batch(messages(b'{"value": 7}')).to_pylist() == [{"value": 7, "_value": '{"value": 7}'}]


def test_line_feeds_within_a_message_do_not_split_it() -> None:
    pretty = json.dumps({"a": 1, "b": "x y"}, indent=2).encode()
    rows = parsed(struct(a=LongType(), b=StringType()), pretty, b'{"a":2}')
    assert rows == [{"a": 1, "b": "x y"}, {"a": 2, "b": None}]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abcd"), json_values, max_size=4), min_size=1, max_size=5))
def test_both_ways_of_parsing_agree(records: list[dict[str, Any]]) -> None:
    schema = struct(a=LongType(), b=StringType(), c=ArrayType(DoubleType()), d=struct(a=BooleanType()))
    layout = Layout(StructType([*schema.fields, StructField("_corrupt", StringType())]), "", "fail")
    parser = layout._parser
    assert parser is not None
    run = messages(*(json.dumps(record).encode() for record in records))
    together = parser._parse_together(run)
    if together is not None:
        alone = parser._parse_one_by_one(run)
        assert {name: column.to_pylist() for name, column in together.items()} == {
            name: column.to_pylist() for name, column in alone.items()
        }
