"""The settings of a Spark session that matter for streams, as one function.

Two dominate the latency of a micro-batch: Unix sockets between the JVM and Python (TCP costs about 40 ms a hop), and a
checkpoint writer that does not start processes (about 100 ms a batch on a local disk).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECOMMENDED: Final[dict[str, str]] = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.adaptive.enabled": "false",
}
"""For every session. Adaptive execution is off because it may choose another partitioning on a retry."""

LOCAL_CHECKPOINTS: Final[dict[str, str]] = {
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}
"""Where checkpoints lie on a local disk: no checksum files beside them, which halves what is left of their cost."""


def recommended_settings(*, local_checkpoints: bool = True) -> dict[str, str]:
    """The settings by name. Leave `local_checkpoints` off where they lie in HDFS or an object store."""
    return RECOMMENDED | (LOCAL_CHECKPOINTS if local_checkpoints else {})


def configure(builder: SparkSession.Builder, *, local_checkpoints: bool = True) -> SparkSession.Builder:
    """Put the settings into a session that is being built, with this Python for the workers unless one is set.

    Without that, Spark would start whichever `python3` comes first on the path, and not find this package there.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in recommended_settings(local_checkpoints=local_checkpoints).items():
        builder = builder.config(name, value)
    return builder


def conf_lines(*, local_checkpoints: bool = True) -> list[str]:
    """The same for a command line of spark-submit."""
    settings = recommended_settings(local_checkpoints=local_checkpoints)
    return [f"--conf {name}={value}" for name, value in settings.items()]
