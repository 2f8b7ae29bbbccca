"""The Spark session of the benchmarks: local[2] with the recommended settings."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPOSITORY = Path(__file__).resolve().parent.parent


@contextmanager
def spark_session(cores: int = 2) -> Iterator[SparkSession]:
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise SystemExit("PySpark is missing: pip install --require-hashes -r requirements/stack.txt") from None
    if shutil.which("java") is None:
        raise SystemExit("Java is missing; on Debian: apt-get install openjdk-17-jre-headless")
    from headwater.spark import configure
    from headwater.spark.class_archive import JAVA_OPTIONS
    from headwater.spark.home import use_quick_home
    from headwater.spark.session import skip_checksum_files

    archive = use_quick_home("local")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="spark-bench-") as scratch:
        builder = (
            SparkSession.Builder()
            .master(f"local[{cores}]")
            .appName("headwater-bench")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.memory", "2g")
            .config("spark.sql.warehouse.dir", f"{scratch}/warehouse")
            .config("spark.local.dir", scratch)
        )
        if archive is not None:
            builder = builder.config(JAVA_OPTIONS, archive.java_options())
        session = configure(builder).getOrCreate()
        skip_checksum_files()
        session.sparkContext.setLogLevel("ERROR")
        try:
            yield session
        finally:
            session.stop()
