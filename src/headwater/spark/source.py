"""The data source that Spark knows as `headwater`: options in, readers and writers out.

Spark starts processes that only look the source up, or ask it for its schema, several for each query. What reads and
writes is imported where it is asked for, so that these do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from headwater.spark.columns import default_schema
from headwater.spark.options import as_manual, sink_options, source_options

if TYPE_CHECKING:
    from headwater.spark.reader import BatchReader
    from headwater.spark.stream_reader import StreamReader
    from headwater.spark.writer import BatchWriter, StreamWriter


class HeadwaterSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> StructType:
        options = source_options(self.options)
        return default_schema(options.value_type, options.metadata_prefix)

    def reader(self, schema: StructType) -> BatchReader:
        from headwater.spark.reader import BatchReader

        return BatchReader(source_options(self.options), schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        from headwater.spark.stream_reader import StreamReader

        return StreamReader(source_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        from headwater.spark.writer import BatchWriter

        return BatchWriter(sink_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        from headwater.spark.writer import StreamWriter

        return StreamWriter(sink_options(self.options), schema)


HeadwaterSource.__doc__ = f"""Durable streams as a Spark source and sink, exactly-once both ways.

Read, continuously or once::

    url = "http://localhost:4437/v1/stream"
    spark.readStream.format("headwater").option("url", url).option("streams", "orders").load()
    spark.read.format("headwater").option("url", url).option("prefix", "orders/").load()

Columns: ``stream``, ``offset`` (of the message's end: what a client would resume from), ``position`` (messages before
it), ``value``, ``content_type``, ``snapshot`` (the row is a snapshot, not a message). With ``.schema("id long, name
string, _corrupt string")`` JSON messages come as typed columns instead; columns of ours may be among them, and only
what the schema names is made and sent to Spark.

Write, each row once::

    df.writeStream.format("headwater").option("url", url).option("stream", "copies").start()
    df.write.format("headwater").option("url", url).mode("append").save()
{as_manual()}
"""
