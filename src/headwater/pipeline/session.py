"""The Spark session of the pipeline and of the commands that use Spark, with the settings that streams need.

Invariant: an existing session (of a notebook or a test) is used unchanged and left running.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.spark.class_archive import ClassArchive

DEFAULT_MASTER: Final = "local[2]"


class SparkMissingError(Exception):
    """Spark or Java is not installed; the message says how to install it."""


@contextmanager
def spark_session(
    name: str,
    master: str = DEFAULT_MASTER,
    settings: Mapping[str, str] | None = None,
    *,
    local_checkpoints: bool | None = None,
    log_level: str = "FATAL",
    archives_classes: bool = False,
) -> Iterator[SparkSession]:
    """A session for the duration of the block.

    Under spark-submit, which has chosen the master, `master` is ignored. `local_checkpoints` says whether checkpoints
    are on a local disk; by default they are if the master is local. `log_level` hides Spark's own traces, because a
    command prints an error as one line. With `archives_classes`, the end of the first session takes some seconds
    longer, and later ones start faster.
    """
    _require_java()
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - half a gigabyte that not every installation has
    except ImportError:
        raise SparkMissingError("Spark is not installed; run: pip install 'headwater[pipeline]'") from None
    if (active := SparkSession.getActiveSession()) is not None:
        yield active
        return
    from headwater.spark.class_archive import JAVA_OPTIONS  # noqa: PLC0415
    from headwater.spark.home import use_quick_home  # noqa: PLC0415
    from headwater.spark.session import start_session  # noqa: PLC0415

    local = master.startswith("local")
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": log_level,
        "spark.sql.shuffle.partitions": "2" if local else "200",
        **(settings or {}),
    }
    archive = use_quick_home(master) if archives_classes and JAVA_OPTIONS not in conf else None
    writes = archive is not None and not archive.exists
    if archive is not None and writes:
        conf[JAVA_OPTIONS] = archive.java_options(writes=True)
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit sets it.
        master = ""
    session = start_session(
        name, master, conf, local_checkpoints=local if local_checkpoints is None else local_checkpoints
    )
    session.sparkContext.setLogLevel(log_level)
    try:
        yield session
    finally:
        session.stop()
        if archive is not None and writes:
            _end_jvm(archive)


def _end_jvm(archive: ClassArchive) -> None:
    """End the JVM, which writes its classes to the archive."""
    from pyspark import SparkContext  # noqa: PLC0415

    gateway, jvm = SparkContext._gateway, SparkContext._gateway.proc if SparkContext._gateway else None
    if gateway is None or jvm is None or jvm.stdin is None:
        return
    gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    jvm.stdin.close()
    archive.install(jvm)


def _require_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if not ((home and Path(home, "bin", "java").exists()) or shutil.which("java")):
        raise SparkMissingError(
            "Java is not installed, and Spark needs version 17 (on Debian: apt-get install openjdk-17-jre-headless)"
        )
