"""The metadata columns of the source: their names, and the types that each may have.

This module does not import pyarrow, because Spark asks for the schema in processes that need nothing else.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import BinaryType, BooleanType, DataType, LongType, StringType, StructField, StructType

from headwater.spark.options import ValueType

METADATA: Final[dict[str, tuple[DataType, ...]]] = {
    "stream": (StringType(),),
    "offset": (StringType(),),
    "position": (LongType(),),
    "value": (StringType(), BinaryType()),
    "content_type": (StringType(),),
    "snapshot": (BooleanType(),),
}


def default_schema(value_type: ValueType, prefix: str) -> StructType:
    """The columns of a query without a schema."""
    types = {name: choices[0] for name, choices in METADATA.items()}
    if value_type == "binary":
        types["value"] = BinaryType()
    return StructType([StructField(prefix + name, type_) for name, type_ in types.items()])
