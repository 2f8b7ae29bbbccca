"""Settings of a Spark session for streams.

Two have the largest effect on the latency of a micro-batch: Unix sockets between the JVM and Python (TCP costs about
40 ms per hop), and a checkpoint writer that does not start processes (about 100 ms per batch on a local disk).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from headwater.spark.callbacks import start_callback_server
from headwater.spark.class_archive import JAVA_OPTIONS
from headwater.spark.home import use_quick_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("headwater.spark")

RECOMMENDED: Final[dict[str, str]] = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.python.filterPushdown.enabled": "true",
}
"""For every session. Adaptive execution is off because it may choose another partitioning on a retry."""

LOCAL_CHECKPOINTS: Final[dict[str, str]] = {
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}
"""For checkpoints on a local disk: no checksum files, as `skip_checksum_files` does, but from the first file on.

Hadoop's `FileSystem.getLocal`, which RocksDB state stores use, cannot work with this file system.
"""


def recommended_settings(*, local_checkpoints: bool = False) -> dict[str, str]:
    """The settings by name.

    Set `local_checkpoints` if checkpoints are on a local disk and no query of the session has a RocksDB state store.
    """
    return RECOMMENDED | (LOCAL_CHECKPOINTS if local_checkpoints else {})


def configure(builder: SparkSession.Builder, *, local_checkpoints: bool = False) -> SparkSession.Builder:
    """Add the settings to a session builder, and use this Python for the workers.

    Otherwise Spark starts the first `python3` on the path, which may not have this package. `PYSPARK_PYTHON` overrides
    it.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in recommended_settings(local_checkpoints=local_checkpoints).items():
        builder = builder.config(name, value)
    return builder


def session(name: str = "headwater", *, master: str = "", local_checkpoints: bool = False) -> SparkSession:
    """A session with the settings: a new one, or the running one.

    `master` defaults to that of spark-submit, or `local[*]`.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - workers import this module and need no session

    running = SparkSession.getActiveSession()
    if running is not None:
        warn_of_missing_settings(running)
        return running
    return start_session(name, master, local_checkpoints=local_checkpoints)


def start_session(
    name: str, master: str = "", conf: Mapping[str, str] | None = None, *, local_checkpoints: bool = False
) -> SparkSession:
    """Start a session with the settings and those of `conf`, and with all that makes a session start and run faster.

    Every session of this package is started here: a Spark home whose processes start quickly, a JVM with an archive of
    its classes, a callback server with a low descriptor, and no checksum files.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415

    archive = use_quick_home(master)
    builder = SparkSession.Builder().appName(name)
    if master:
        builder = builder.master(master)
    if archive is not None:
        builder = builder.config(JAVA_OPTIONS, archive.java_options())
    for key, value in (conf or {}).items():
        builder = builder.config(key, value)
    started = configure(builder, local_checkpoints=local_checkpoints).getOrCreate()
    start_callback_server()
    skip_checksum_files()
    return started


def skip_checksum_files() -> None:
    """Let this process's Spark write files on a local disk without Hadoop's checksum files (`.name.crc`).

    It saves about 6 ms for each of the two files that a micro-batch writes. Files that have one are still checked when
    they are read. No setting of Spark or Hadoop does this; Spark Connect has no JVM here, and is left as it is.
    """
    from pyspark import SparkContext  # noqa: PLC0415

    context, jvm = SparkContext._active_spark_context, SparkContext._jvm
    if context is None or jvm is None:
        return
    local = jvm.org.apache.hadoop.fs.FileSystem.get(jvm.java.net.URI("file:///"), context._jsc.hadoopConfiguration())
    if hasattr(local, "setWriteChecksum"):
        local.setWriteChecksum(False)


def warn_of_missing_settings(running: SparkSession) -> None:
    """Warn if a running session was started without the settings; they cannot be changed later."""
    missing = [
        f"{name}={value}"
        for name, value in RECOMMENDED.items()
        if (running.conf.get(name, "") or "").lower() != value.lower()
    ]
    if missing:
        log.warning(
            "This Spark session lacks %s. Each micro-batch takes up to 200 ms longer. Stop it and use"
            " headwater.spark.session(), or start Spark with --conf for each of them.",
            ", ".join(missing),
        )


def warn_of_slow_sockets(environment: Mapping[str, str]) -> None:
    """Warn if the session of this process lacks the setting with the largest effect on latency."""
    if environment.get("PYTHON_UNIX_DOMAIN_ENABLED", "false").lower() != "true":
        log.warning(
            "This Spark session talks to Python over TCP, which adds about 40 ms to every step of a micro-batch."
            " Use headwater.spark.session(), or start Spark with: %s",
            " ".join(conf_lines()),
        )


def conf_lines(*, local_checkpoints: bool = False) -> list[str]:
    """The settings as arguments of spark-submit."""
    settings = recommended_settings(local_checkpoints=local_checkpoints)
    return [f"--conf {name}={value}" for name, value in settings.items()]
