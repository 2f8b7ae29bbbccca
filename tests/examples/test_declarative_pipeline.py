"""The example for Spark's declarative pipelines, run twice by Spark's own command: each order arrives once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.serving import serve
from tests.spark.processes import SPARK_HOME
from tests.spark.session import REPOSITORY, require_java, worker_environment
from tests.spark.streams import Streams

EXAMPLE = REPOSITORY / "examples" / "declarative_pipeline"

# Spark starts a Connect server for each run.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def run_pipeline(project: Path, url: str) -> None:
    done = subprocess.run(
        [str(SPARK_HOME / "bin" / "spark-pipelines"), "run"],
        cwd=project,
        env=os.environ
        | worker_environment()
        | {"SPARK_HOME": str(SPARK_HOME), "STREAMS_URL": url, "SPARK_LOCAL_DIRS": str(project)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_sources_and_sinks_work_in_a_declarative_pipeline(tmp_path: Path) -> None:
    require_java()
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project)
    spec = project / "spark-pipeline.yml"
    spec.write_text(
        spec.read_text().replace("file:///tmp/headwater-declarative-pipeline", f"file://{tmp_path}/storage")
    )
    with serve() as server, httpx.Client(timeout=60) as http:
        streams = Streams(f"{server.url}/v1/stream", http)
        orders = [{"id": 1, "customer": "ada", "amount": 10}, {"id": 2, "customer": "bob", "amount": 20}]
        streams.filled("orders", orders)
        run_pipeline(project, streams.root)
        assert streams.messages("large-orders") == orders[1:]
        more = {"id": 3, "customer": "ada", "amount": 30}
        streams.append("orders", [more])
        run_pipeline(project, streams.root)
        assert streams.messages("large-orders") == [orders[1], more]
    assert list((tmp_path / "storage").rglob("commits/1")), "checkpoints are in the storage of the pipeline"
