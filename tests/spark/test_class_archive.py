"""The archive of the JVM's classes: who writes it, who uses it, and that only a complete one is used."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pyspark
import pytest

from headwater.spark.class_archive import ClassArchive, class_archive

LAUNCHER = next(Path(pyspark.__file__).parent.glob("jars/spark-launcher_*.jar"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    (tmp_path / "jars").mkdir()
    return tmp_path


def jvm(archive: ClassArchive) -> subprocess.Popen[bytes]:
    """A JVM with the options of the archive that loads classes of a jar and ends."""
    words = ["java", *archive.java_options(writes=True).split(), "-cp", str(LAUNCHER), "org.apache.spark.launcher.Main"]
    spark = {"SPARK_HOME": str(LAUNCHER.parents[1]), "SPARK_SCALA_VERSION": "2.13"}
    return subprocess.Popen(
        [*words, "org.apache.spark.deploy.SparkSubmit", "pyspark-shell"],
        env=os.environ | spark,
        stdout=subprocess.DEVNULL,
    )


def test_first_jvm_writes_the_archive_and_the_next_one_uses_it(home: Path) -> None:
    archive = class_archive(home)
    assert archive is not None
    assert "Archive" not in archive.java_options()
    assert archive.java_options(writes=True).startswith("-XX:ArchiveClassesAtExit=")
    archive.install(jvm(archive))
    assert archive.exists
    assert archive.java_options(writes=True).startswith(f"-XX:SharedArchiveFile={archive.path} ")
    assert [path.name for path in home.iterdir() if path.is_file()] == [archive.path.name]
    required = ["java", *archive.java_options().split(), "-Xshare:on", "-cp", str(LAUNCHER)]
    done = subprocess.run([*required, "-version"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_archive_of_a_jvm_that_failed_is_not_used(home: Path) -> None:
    archive = class_archive(home)
    assert archive is not None
    archive.draft.write_bytes(b"half of an archive")
    archive.install(subprocess.Popen(["false"]))
    assert not archive.exists
    assert not archive.draft.exists()


def test_other_jars_and_another_java_have_their_own_archive(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = class_archive(home)
    (home / "jars" / "added.jar").write_bytes(b"")
    second = class_archive(home)
    monkeypatch.setenv("JAVA_HOME", str(home))
    (home / "bin").mkdir()
    (home / "bin" / "java").write_bytes(b"")
    third = class_archive(home)
    assert first is not None
    assert second is not None
    assert third is not None
    assert len({first.path, second.path, third.path}) == 3


def test_home_with_a_configuration_directory_has_no_archive(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "conf").mkdir()
    assert class_archive(home) is not None
    (home / "conf" / "spark-defaults.conf").write_text("")
    assert class_archive(home) is None
    monkeypatch.setenv("SPARK_CONF_DIR", str(home / "jars"))
    assert class_archive(home) is not None
