"""Every kind of job in one application on a standalone cluster of two workers, run with spark-submit from a wheel.

An executor is killed while it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.pipeline.buckets import Bucket
from tests.pipeline.syncing import syncing
from tests.pipeline.test_archive import held
from tests.pipeline.test_fold import rows
from tests.pipeline.waiting import eventually
from tests.postgres.databases import database
from tests.serving import Server
from tests.spark.processes import SPARK_HOME, environment, installed_wheel, standalone_cluster
from tests.spark.streams import Streams

# Takes minutes, because it starts a cluster. Run by `make test-long`.
pytestmark = pytest.mark.long

STREAMS = 10


@pytest.mark.timeout(900)
def test_both_directions_a_fold_and_an_archive_on_a_cluster(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, server: Server, streams: Streams
) -> None:
    package = installed_wheel(tmp_path_factory.mktemp("wheel"))
    program = (
        *(str(SPARK_HOME / "bin" / "spark-submit"), "--conf", "spark.executor.memory=512m"),
        *("--conf", "spark.driver.host=127.0.0.1", "--master"),
    )
    entry = str(package / "headwater" / "pipeline" / "submit.py")
    config = tmp_path / "pipeline.toml"
    config.write_text(
        "[[to_postgres]]\nname = 'in'\nstreams = ['cluster-in']\n"
        "[[from_postgres]]\nname = 'out'\ncreate_items = true\n"
        "tables = [{ table = 'items', stream = 'cluster-out' }]\n"
        "[[fold]]\nbucket = 'cluster-fold'\ntable = 'folded'\n"
        f"[[archive]]\nbucket = 'cluster-lake'\nlake = '{tmp_path / 'lake'}'\n",
        encoding="utf-8",
    )
    folded = Bucket(server, streams.http, "cluster-fold")
    lake = Bucket(server, streams.http, "cluster-lake")
    for n in range(STREAMS):
        folded.create(f"f{n}")
        lake.create(f"l{n}")
    with database() as postgres, standalone_cluster(tmp_path, package) as cluster:
        command = (*program, cluster.master, entry)
        env = environment(package)
        with syncing(tmp_path, server.url, postgres.url, "--config", str(config), environ=env, program=command) as sync:
            sync.wait_until_ready()
            for first in range(0, 2000, 100):
                streams.append("cluster-in", [{"key": str(n)} for n in range(first, first + 100)])
                with psycopg.connect(postgres.url) as sql:
                    sql.execute(
                        "INSERT INTO items (title) SELECT n::text FROM generate_series(%s::int, %s) AS n",
                        [first, first + 99],
                    )
                number = first // 100 % STREAMS
                events = [{"type": "t", "key": str(n % 7), "operation": "set", "value": n} for n in range(100)]
                folded.append(f"f{number}", events)
                lake.append(f"l{number}", [{"n": first + n} for n in range(100)])
                if first == 1000:
                    executors = eventually(cluster.executors, bool)
                    executors[0].kill()
            published = eventually(lambda: streams.messages("cluster-out"), lambda found: len(found) >= 2000)

            def keys() -> list[int]:
                with psycopg.connect(postgres.url) as sql:
                    return [row[0] for row in sql.execute("SELECT event_key::int FROM session_events ORDER BY id")]

            table = eventually(keys, lambda found: len(found) >= 2000)
            tails = [folded.tail(f"f{n}") for n in range(STREAMS)]
            eventually(lambda: [folded.snapshot_offset(f"f{n}") for n in range(STREAMS)], lambda found: found == tails)
            eventually(lambda: in_lake(tmp_path / "lake"), lambda found: sum(map(len, found.values())) >= 2000)
            entries = rows(postgres.url, "folded")
    assert [int(one["title"]) for one in published] == list(range(2000))
    assert table == list(range(2000))
    assert {(stream, len(kept)) for stream, kept in entries.items()} == {(f"f{n}", 7) for n in range(STREAMS)}
    assert held(tmp_path / "lake") == {f"l{n}": lake.messages(f"l{n}") for n in range(STREAMS)}


def in_lake(lake: Path) -> dict[str, list[Any]]:
    return held(lake) if lake.exists() else {}
