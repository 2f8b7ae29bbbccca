"""The driver that is killed: the application of `headwater sync`, and a job that copies streams to streams.

Run as `python -m tests.kills.application FILE`, the settings file of a pipeline. `HEADWATER_TEST_COPY` adds the copy.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from headwater.pipeline.application import Application
from headwater.pipeline.job import Job, JobEnvironment
from headwater.pipeline.settings import PipelineSettings, load
from headwater.pipeline.stderr_lines import tidy_stderr
from headwater.pipeline.stream_job import StreamJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SOURCES = ("one", "two", "three")


class Copy(StreamJob):
    """Copies each stream to `copy-of-…`, in small batches of several tasks and in several appends each."""

    @property
    def target(self) -> str:
        return "copies"

    def start(self, spark: SparkSession, environment: JobEnvironment) -> StreamingQuery:
        rows = (
            spark.readStream.format("headwater")
            .options(**self.source_options(environment), maxRowsPerBatch="2000", splitBytes="30000")
            .load()
        )
        return (
            rows.select(F.concat(F.lit("copy-of-"), "stream").alias("stream"), "value")
            .writeStream.format("headwater")
            .queryName(self.name)
            .options(**environment.options, createMissing="true", maxRequestBytes="4000")
            .option("checkpointLocation", environment.checkpoint(self.name))
            .trigger(processingTime="0 seconds")
            .start()
        )


class SettingsWithCopy(PipelineSettings):
    def jobs(self) -> list[Job]:
        return [*super().jobs(), Copy(name="copy", streams=SOURCES)]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    settings = load(Path(sys.argv[1]), os.environ)
    wanted = SettingsWithCopy if os.environ.get("HEADWATER_TEST_COPY") else PipelineSettings
    with tidy_stderr():
        raise SystemExit(Application(wanted(**dict(settings))).run())


if __name__ == "__main__":
    main()
