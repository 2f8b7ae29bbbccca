"""The Spark data source `headwater_postgres`: reads changes of tables and writes events of streams.

The pipeline's jobs use both sides and set the options; `register(spark)` registers the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import LongType, StringType, StructField, StructType

from headwater.pipeline.postgres_reader import PostgresReader, ReaderPlan
from headwater.pipeline.postgres_writer import PostgresWriter, WriterPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME: Final = "headwater_postgres"
PLAN: Final = "plan"
"""The option with the plan, as JSON."""
_reader_plans: Final = msgspec.json.Decoder(ReaderPlan)
_writer_plans: Final = msgspec.json.Decoder(WriterPlan)


def messages_schema() -> StructType:
    """Messages of streams, numbered within their batch."""
    return StructType(
        [
            StructField("stream", StringType(), nullable=False),
            StructField("position", LongType(), nullable=False),
            StructField("value", StringType(), nullable=False),
        ]
    )


class PostgresSource(DataSource):
    """`plan` holds a `ReaderPlan` (source) or a `WriterPlan` (sink) as JSON; `url`, which Spark hides, the database."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return messages_schema()

    def streamReader(self, schema: StructType) -> PostgresReader:
        return PostgresReader(self.options["url"], _reader_plans.decode(self.options[PLAN]))

    def streamWriter(self, schema: StructType, overwrite: bool) -> PostgresWriter:
        return PostgresWriter(self.options["url"], _writer_plans.decode(self.options[PLAN]))


def register(spark: SparkSession) -> None:
    spark.dataSource.register(PostgresSource)
