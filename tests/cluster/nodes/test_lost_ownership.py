"""What clients get while their shard changes its owner: 503, and the request to retry."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import uvloop

from headwater.cluster.nodes.schema import connect
from headwater.stack.database import LocalPostgres
from tests.cluster.nodes.standby_scene import StandbyScene, body_of, status_of
from tests.storage.tiering.objects import memory_objects
from tests.waiting import async_wait_until


def check_refused(response: bytes | None, detail: str) -> None:
    assert response is not None
    assert status_of(response) == 503
    assert b"\r\nRetry-After: 1\r\n" in response
    problem = json.loads(body_of(response))
    assert problem["code"] == "storage_unavailable"
    assert problem["detail"].startswith(detail)


def test_writers_that_wait_while_the_shard_is_taken_over_are_asked_to_retry(
    single: LocalPostgres, shard: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        scene = StandbyScene(single, shard, tmp_path, memory_objects())
        async with asyncio.timeout(120), scene.owned(1):
            await scene.create("s")
            # The next owner takes the shard while the first of them waits for the row.
            with connect(single.url, "test") as connection, connection.transaction():
                connection.execute("UPDATE headwater.shard SET epoch = 2 WHERE id = %s", [shard])
                waiting = [asyncio.create_task(scene.asked(scene.owner, "POST", "s", b"x")) for _ in range(3)]
                locks = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
                await async_wait_until(lambda: connection.execute(locks).fetchone() == (True,))
            for response in await asyncio.gather(*waiting):
                check_refused(response, "The owner of this stream is changing, and whether the write was stored")
            # Until the process ends.
            for method in ("POST", "PUT", "DELETE"):
                name = "other" if method == "PUT" else "s"
                check_refused(await scene.asked(scene.owner, method, name, b"x"), "The owner of this stream is chang")
            read = await scene.asked(scene.owner, "GET", "s")
            assert read is not None
            assert (status_of(read), body_of(read)) == (200, b"")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    failures = [record for record in caplog.records if record.name == "headwater.engine"]
    assert [(record.levelname, record.exc_info) for record in failures] == [("ERROR", None)]
    assert f"Shard {shard} was taken over by another node." in failures[0].getMessage()
