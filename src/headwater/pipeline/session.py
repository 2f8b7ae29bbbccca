"""The Spark session of a command: local unless a master is named, with the settings that streams need, and quiet."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER: Final = "local[2]"


class NoSpark(Exception):
    """Spark or Java is missing; says how to get it."""


@contextmanager
def spark_session(
    name: str, master: str = DEFAULT_MASTER, settings: dict[str, str] | None = None
) -> Iterator[SparkSession]:
    """A session for as long as the block lasts; where there is one already, in a notebook for example, that one."""
    home = os.environ.get("JAVA_HOME")
    if not ((home and Path(home, "bin", "java").exists()) or shutil.which("java")):
        raise NoSpark("Java is missing: Spark needs a version 17 (on Debian: apt-get install openjdk-17-jre-headless)")
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - half a gigabyte that not everybody has
    except ImportError:
        raise NoSpark("Spark is missing: pip install headwater[pipeline]") from None
    if (active := SparkSession.getActiveSession()) is not None:
        yield active
        return
    from headwater.spark import configure  # noqa: PLC0415

    local = master.startswith("local")
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.Builder().master(master).appName(name)
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "FATAL"}
    for key, value in {**quiet, "spark.sql.shuffle.partitions": "2" if local else "200", **(settings or {})}.items():
        builder = builder.config(key, value)
    session = configure(builder, local_checkpoints=local).getOrCreate()
    # Of an error the command tells its one line; Spark would print a page of traces before it.
    session.sparkContext.setLogLevel("FATAL")
    try:
        yield session
    finally:
        session.stop()
