"""The metadata columns of the source: their names, and the types that each may have.

This module does not import pyarrow, because Spark asks for the schema in processes that do nothing else.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headwater.spark.options import ValueType

METADATA: Final[dict[str, tuple[DataType, ...]]] = {
    "stream": (StringType(),),
    "offset": (StringType(),),
    "position": (LongType(),),
    "value": (StringType(), BinaryType()),
    "content_type": (StringType(),),
    "snapshot": (BooleanType(),),
    "timestamp": (TimestampType(),),
}


STATE: Final[dict[str, DataType]] = {"key": StringType(), "headers": MapType(StringType(), StringType())}
"""Columns of state-protocol messages."""


def default_schema(value_type: ValueType, prefix: str, *, with_headers: bool = False) -> StructType:
    """The columns of a query without a schema."""
    types = {name: choices[0] for name, choices in METADATA.items()}
    if with_headers:
        types |= STATE
    if value_type == "binary":
        types["value"] = BinaryType()
    return StructType([StructField(prefix + name, type_) for name, type_ in types.items()])
