"""The Spark home without an archive: when it is used, and that Python processes import the installed package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import SparkSession

from headwater.spark.home import use_quick_home


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment without a Spark home, restored after the test."""
    monkeypatch.setenv("SPARK_HOME", "to be restored")
    monkeypatch.delenv("SPARK_HOME")
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setenv("PYSPARK_PYTHON", "/another/python")  # Nothing is forked for it.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("master", ["", "local[2]"])
def test_a_local_spark_gets_links_to_programs_and_jars(surroundings: Path, master: str) -> None:
    use_quick_home(master)
    home = Path(os.environ["SPARK_HOME"])
    installed = Path(pyspark.__file__).parent
    assert surroundings in home.parents
    assert (home / "jars").readlink() == installed / "jars"
    assert (home / "bin" / "spark-submit").exists()
    assert not (home / "python").exists()


def test_home_is_linked_again_after_the_package_has_moved(surroundings: Path) -> None:
    use_quick_home("local[2]")
    home = Path(os.environ.pop("SPARK_HOME"))
    (home / "jars").unlink()
    (home / "jars").symlink_to(surroundings / "gone")
    use_quick_home("local[2]")
    assert (home / "jars").exists()


def test_clusters_and_configured_homes_are_unchanged(surroundings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_quick_home("spark://host:7077")
    assert "SPARK_HOME" not in os.environ
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    use_quick_home("local[2]")
    assert os.environ["SPARK_HOME"] == "/opt/spark"


def test_spark_starts_without_the_home_if_it_cannot_be_created(surroundings: Path) -> None:
    (surroundings / "headwater").write_text("not a directory")
    use_quick_home("local[2]")
    assert "SPARK_HOME" not in os.environ


def test_workers_import_the_installed_package(spark: SparkSession) -> None:
    def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"file": [pyspark.__file__]})

    (row,) = spark.range(1, numPartitions=1).mapInArrow(where, "file string").collect()
    assert Path(row.file) == Path(pyspark.__file__)
