"""The data source `headwater` of Spark: creates readers and writers from options.

Spark starts several processes per query that only look up the source or ask for its schema. Readers and writers are
imported when they are needed, so that these processes start faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from headwater.spark.columns import default_schema
from headwater.spark.option_table import as_manual
from headwater.spark.options import sink_options, source_options

if TYPE_CHECKING:
    from headwater.spark.reader import BatchReader
    from headwater.spark.stream_reader import MicroBatchReader
    from headwater.spark.writer import BatchWriter, MicroBatchWriter


class HeadwaterSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> StructType:
        options = source_options(self.options)
        return default_schema(options.value_type, options.metadata_prefix, with_headers=options.with_headers)

    def reader(self, schema: StructType) -> BatchReader:
        from headwater.spark.pushdown import FilteringBatchReader, is_pushdown_process
        from headwater.spark.reader import BatchReader

        kind = FilteringBatchReader if is_pushdown_process() else BatchReader
        return kind(source_options(self.options), schema)

    def streamReader(self, schema: StructType) -> MicroBatchReader:
        from headwater.spark.stream_reader import MicroBatchReader

        return MicroBatchReader(source_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        from headwater.spark.writer import BatchWriter

        return BatchWriter(sink_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> MicroBatchWriter:
        from headwater.spark.writer import MicroBatchWriter

        return MicroBatchWriter(sink_options(self.options), schema, complete=overwrite)


HeadwaterSource.__doc__ = f"""Durable streams as a Spark source and sink, exactly-once both ways.

Read, continuously or once::

    url = "http://localhost:4437/v1/stream"
    spark.readStream.format("headwater").option("url", url).option("streams", "orders").load()
    spark.read.format("headwater").option("url", url).option("prefix", "orders/").load()

Columns: ``stream``, ``offset`` (after the message: a client resumes from it), ``position`` (messages before it),
``value``, ``content_type``, ``snapshot`` (the row is a snapshot, not a message). With ``.schema("id long, name
string, _corrupt string")`` the fields of JSON messages are typed columns; the columns above may be among them, and
only the columns of the schema are built and sent to Spark.

Write, each row once::

    df.writeStream.format("headwater").option("url", url).option("stream", "copies").start()
    df.write.format("headwater").option("url", url).mode("append").save()
{as_manual()}
"""
