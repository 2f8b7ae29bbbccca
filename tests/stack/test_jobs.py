"""The pipeline's jobs in `headwater status`: the last state of each; a job that stops reporting is silent."""

from __future__ import annotations

import time

import pytest
from rich.console import Console

from headwater.client import ClientError
from headwater.spark.status import PIPELINE, StatusStream
from headwater.stack.display import jobs_table
from headwater.stack.jobs import STATUS_STREAM, pipeline_jobs
from tests.serving import serve


def test_last_state_of_each_job_is_reported() -> None:
    assert STATUS_STREAM == PIPELINE
    with serve(DS_STORAGE__MODE="memory") as server:
        assert pipeline_jobs([server.url]) == []
        status = StatusStream(f"{server.url}/v1/stream")
        status.publish("query", "orders", {"status": "starting", "rows": 1})
        status.publish("slot", "headwater", {"status": "running"})
        status.close()
        status = StatusStream(f"{server.url}/v1/stream")
        status.publish(
            "query", "orders", {"status": "running", "rows": 1200, "source": "orders", "target": "table orders"}
        )
        status.publish("query", "old", {"status": "running", "updated_at_ms": int((time.time() - 300) * 1000)})
        status.publish("query", "down", {"status": "failed", "error": {"message": "The slot is gone.", "at_ms": 1}})
        status.close()
        jobs = pipeline_jobs([server.url])
    assert [(job.name, job.status) for job in jobs] == [("down", "failed"), ("old", "silent"), ("orders", "running")]
    assert jobs[2].rows == 1200
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(jobs_table(jobs))
    shown = captured.get()
    assert "1,200" in shown
    assert "orders → table orders" in shown
    assert "The slot is gone." in shown


def test_unreachable_server_is_reported() -> None:
    with serve(DS_STORAGE__MODE="memory") as server:
        url = server.url
    with pytest.raises(ClientError):
        pipeline_jobs([url])
