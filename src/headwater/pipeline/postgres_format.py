"""The data source that Spark knows as `headwater_postgres`: changes of tables out, events of streams in.

Both sides are used by the pipeline's jobs, which set the options; `register(spark)` makes the name known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import LongType, StringType, StructField, StructType

from headwater.pipeline.changes import ChangesReader, Following
from headwater.pipeline.events import EventsWriter, Filling

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME: Final = "headwater_postgres"
PLAN: Final = "plan"
"""The one option: what to do, as JSON."""


class PostgresSource(DataSource):
    """`plan` holds a `Following` (source) or a `Filling` (sink) as JSON; `url`, which Spark hides, the database."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return StructType(
            [
                StructField("stream", StringType(), nullable=False),
                StructField("position", LongType(), nullable=False),
                StructField("value", StringType(), nullable=False),
            ]
        )

    def streamReader(self, schema: StructType) -> ChangesReader:
        return ChangesReader(self.options["url"], msgspec.json.decode(self.options[PLAN], type=Following))

    def streamWriter(self, schema: StructType, overwrite: bool) -> EventsWriter:
        return EventsWriter(self.options["url"], msgspec.json.decode(self.options[PLAN], type=Filling))


def register(spark: SparkSession) -> None:
    spark.dataSource.register(PostgresSource)
