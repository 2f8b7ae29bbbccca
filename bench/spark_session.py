"""The Spark session of the benchmarks: local[2] with the recommended settings."""

from __future__ import annotations

import importlib.util
import os
import shutil
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
    if importlib.util.find_spec("pyspark") is None:
        raise SystemExit("PySpark is missing: pip install --require-hashes -r requirements/stack.txt")
    if shutil.which("java") is None:
        raise SystemExit("Java is missing; on Debian: apt-get install openjdk-17-jre-headless")
    from headwater.spark.session import start_session

    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="spark-bench-") as scratch:
        conf = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.memory": "2g",
            "spark.sql.warehouse.dir": f"{scratch}/warehouse",
            "spark.local.dir": scratch,
        }
        session = start_session("headwater-bench", f"local[{cores}]", conf)
        session.sparkContext.setLogLevel("ERROR")
        try:
            yield session
        finally:
            session.stop()
