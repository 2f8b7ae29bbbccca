"""Copies of a data directory into a cluster and back, and looking at a cluster as at a data directory."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from headwater.cli import command_line
from headwater.cluster.nodes import copying
from headwater.cluster.nodes.copying import copy_into_cluster, fetched_cluster
from headwater.cluster.nodes.keeper import open_cluster
from headwater.cluster.nodes.open_shard import open_shard
from headwater.cluster.nodes.postgres_journal import PostgresJournal
from headwater.cluster.nodes.schema import connect
from headwater.cluster.nodes.status import NodeStatus
from headwater.cluster.nodes.status_page import StatusPage
from headwater.cluster.peers import Peers
from headwater.cluster.relay import Relay
from headwater.cluster.shards import ShardMap
from headwater.config import ClusterSettings, Settings, StorageSettings
from headwater.stack.database import LocalPostgres
from headwater.storage.interface import StorageError
from headwater.storage.journaled_store import JournaledStorage
from headwater.storage.offline.backup import take_backup
from headwater.storage.offline.check import check
from headwater.storage.offline.stats import offline_stats
from headwater.storage.offline.store_copy import copy_between
from headwater.storage.tiering.claimed_prefix import ClaimedPrefix
from headwater.storage.tiering.object_store import ObjectStoreObjects
from headwater.storage.tiering.restore import restore_replicated
from tests.cluster.nodes.clusters import SECRET
from tests.serving import serve
from tests.storage.tiering.objects import memory_objects
from tests.ui.cluster_state import FIGURES, STATE

TEXT = {"Content-Type": "text/plain"}
SHARDS = 4
DURABLE: dict[str, Any] = {"DS_STORAGE__MODE": "file-durable", "DS_STORAGE__DATA_DIR": "data"}
COLD = "s3://bucket/copy"
_numbers = itertools.count()


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, ObjectStoreObjects]:
    """The object store in memory, by prefix."""
    found: dict[str, ObjectStoreObjects] = defaultdict(memory_objects)

    def open_objects(url: str) -> ObjectStoreObjects:
        objects = found[url]
        objects._url = url
        return objects

    for module in ("cluster.nodes.copying", "cluster.nodes.keeper", "cluster.nodes.open_shard", "storage.tiering.open"):
        monkeypatch.setattr(f"headwater.{module}.open_objects", open_objects)
    return found


@pytest.fixture
def settings(single: LocalPostgres, stores: dict[str, ObjectStoreObjects], tmp_path: Path) -> Settings:
    """A new cluster."""
    name = f"copy{next(_numbers)}"
    with psycopg.connect(single.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return Settings(
        storage=StorageSettings(mode="cluster", cold=COLD, data_dir=tmp_path / "node"),
        cluster=ClusterSettings(
            postgres_url=make_conninfo(single.url, dbname=name), secret=SECRET, require_standby=False, shards=SHARDS
        ),
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with streams, a fork, a producer, a bucket and a snapshot."""
    root = tmp_path_factory.mktemp("source")
    with serve(directory=root, **DURABLE) as server, httpx.Client(base_url=server.url) as client:
        for number in range(12):
            path = f"/v1/stream/s{number}"
            client.put(path, headers=TEXT, content=f"first of {number};").raise_for_status()
            client.post(path, headers=TEXT, content=b"x" * 1000 * (number + 1)).raise_for_status()
        client.put("/v1/stream/fork", headers={"Stream-Forked-From": "/v1/stream/s3"}).raise_for_status()
        client.post("/v1/stream/s1", headers={**TEXT, **_producer(0)}, content="produced;").raise_for_status()
        client.put("/ds/bucket").raise_for_status()
        client.put("/ds/bucket/inside", headers=TEXT, content="in a bucket;").raise_for_status()
        client.delete("/v1/stream/s5").raise_for_status()
    return root / "data"


def _producer(seq: int) -> dict[str, str]:
    return {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": str(seq)}


def served(root: Path) -> dict[str, tuple[bytes, str]]:
    """Everything that a server answers for the data directory `data` in here."""
    paths = [*(f"/v1/stream/s{number}" for number in range(12)), "/v1/stream/fork", "/ds/bucket/inside"]
    with serve(directory=root, **DURABLE) as server, httpx.Client(base_url=server.url) as client:
        answers = {path: client.get(path) for path in paths}
        repeated = client.post("/v1/stream/s1", headers={**TEXT, **_producer(0)}, content="produced;")
        assert repeated.status_code == 204, "the producer is known"
        return {
            path: (answer.content, answer.headers.get("stream-next-offset", "")) for path, answer in answers.items()
        }


def test_copy_into_a_cluster_and_back_has_everything(
    source: Path, settings: Settings, stores: dict[str, ObjectStoreObjects], tmp_path: Path
) -> None:
    copied = copy_into_cluster(source, "file-durable", settings)
    assert copied.streams >= 13
    with fetched_cluster(settings) as fetched:
        assert list(check(fetched)) == []
        stats = offline_stats(fetched)
        assert stats.contents.streams == offline_stats(source).contents.streams
        assert stats.parts["cold_bytes"] > 0
        copy_between(fetched, "file-durable", tmp_path / "data", "file-durable", shard_count=1, map_bytes=2**20)
    before = served(source.parent)
    assert before["/v1/stream/s4"][0] == b"first of 4;" + b"x" * 5000
    assert served(tmp_path) == before
    assert open_cluster(settings).shards == SHARDS, "nodes may start"


def environment_of(settings: Settings) -> dict[str, str]:
    cluster = settings.cluster
    return {
        "DS_STORAGE__MODE": "cluster",
        "DS_STORAGE__COLD": COLD,
        "DS_CLUSTER__POSTGRES_URL": cluster.postgres_url,
        "DS_CLUSTER__SECRET": SECRET,
        "DS_CLUSTER__SHARDS": str(SHARDS),
        "DS_CLUSTER__REQUIRE_STANDBY": "false",
    }


def test_backup_of_a_cluster_is_restored_into_a_directory_and_into_a_cluster(
    source: Path,
    settings: Settings,
    single: LocalPostgres,
    stores: dict[str, ObjectStoreObjects],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy_into_cluster(source, "file-durable", settings)
    environment = environment_of(settings)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    backup = tmp_path / "backup"
    run = CliRunner().invoke
    taken = run(command_line(), ["backup", str(backup)])
    assert taken.exit_code == 0, taken.output
    assert f"{backup}: " in taken.output
    again = run(command_line(), ["backup", str(backup)])
    assert again.exit_code == 1
    assert "already has a store" in str(again.exception)
    data = ["--mode", "file-durable", "--data-dir", str(tmp_path / "data")]
    assert run(command_line(), ["restore", str(backup), *data]).exit_code == 0
    assert "Copy into a prefix of the object store that has none" in str(
        run(command_line(), ["restore", str(backup)]).exception
    )
    assert "cannot be replaced" in str(run(command_line(), ["restore", str(backup), "--force"]).exception)
    stores.clear()
    with psycopg.connect(single.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE restored")
    monkeypatch.setenv("DS_CLUSTER__POSTGRES_URL", make_conninfo(single.url, dbname="restored"))
    restored = run(command_line(), ["restore", str(backup)])
    assert restored.exit_code == 0, restored.output
    assert "cluster headwater: restored and compared 1" in restored.output
    assert run(command_line(), ["backup", str(tmp_path / "other" / "data")]).exit_code == 0
    before = served(source.parent)
    assert served(tmp_path) == before
    assert served(tmp_path / "other") == before


def test_damaged_backup_is_not_restored_into_a_cluster(
    source: Path, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(settings).items():
        monkeypatch.setenv(name, value)
    take_backup(source, tmp_path / "backup")
    segment = next((tmp_path / "backup").rglob("*.log"))
    segment.unlink()
    refused = CliRunner().invoke(command_line(), ["restore", str(tmp_path / "backup")])
    assert f"{segment} is missing from the backup" in str(refused.exception)
    assert open_cluster(settings).shards == SHARDS, "nothing was begun"


def test_shard_of_a_later_version_is_not_taken_for_damaged(
    source: Path, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_into_cluster(source, "file-durable", settings)
    with connect(settings.cluster.postgres_url, "test") as connection:
        connection.execute("UPDATE headwater.shard SET format = 2, seq = 1 WHERE id = 2")
        connection.execute("INSERT INTO headwater.journal (shard, seq, batch) VALUES (2, 1, 'of a later format')")
    for name, value in environment_of(settings).items():
        monkeypatch.setenv(name, value)
    copy = ["store", "copy", "--to-mode", "file-durable", "--to-dir", str(tmp_path / "copy")]
    for command in (["backup", str(tmp_path / "backup")], ["store", "check"], ["store", "stats"], copy):
        refused = CliRunner().invoke(command_line(), command)
        assert refused.exit_code == 1, command
        assert "Shard 2 was written by a later version of Headwater: its format is 2" in str(refused.exception)
    assert not (tmp_path / "backup").exists()


def test_shard_of_a_copied_cluster_is_opened_by_its_first_owner(source: Path, settings: Settings) -> None:
    copy_into_cluster(source, "file-durable", settings)
    shard = ShardMap(SHARDS, SHARDS).shard_of("s4")
    url = settings.cluster.postgres_url
    with connect(url, "test") as connection:
        row = connection.execute(
            "UPDATE headwater.shard SET epoch = epoch + 1 WHERE id = %s RETURNING epoch", [shard]
        ).fetchone()
    assert row == (2,)
    opened = open_shard(settings, shard, SHARDS, 2, 64, lambda: True)
    storage = opened.storage
    assert isinstance(storage, JournaledStorage)
    with closing(storage):
        names = {getattr(record, "name", "") for record in storage.recover()}
        assert "s4" in names
        assert storage._journal is not None
        journal = storage._journal.replica
    assert isinstance(journal, PostgresJournal)
    assert journal.last_lsn == 0
    journal.close()


def test_damage_in_the_object_store_is_found(
    source: Path, settings: Settings, stores: dict[str, ObjectStoreObjects]
) -> None:
    copy_into_cluster(source, "file-durable", settings)
    objects = stores[f"{COLD}/shard-{ShardMap(SHARDS, SHARDS).shard_of('s9'):03}"]
    (pack,) = objects.sizes("packs/")
    stored = objects.get(pack)
    assert stored is not None
    objects.put(pack, stored.data.replace(b"x" * 900, b"y" * 900))
    with fetched_cluster(settings) as fetched:
        assert [problem for problem in check(fetched) if "s9" in problem or "damaged" in problem]


def test_cluster_that_has_data_or_a_node_is_not_copied_into(
    source: Path, settings: Settings, stores: dict[str, ObjectStoreObjects]
) -> None:
    open_cluster(settings)
    for change, reason in (
        ("owner = 'node-1#2'", "shard 2 is owned by node-1#2"),
        ("owner = NULL, seq = 7", "shard 2 has data"),
    ):
        with connect(settings.cluster.postgres_url, "test") as connection:
            connection.execute(f"UPDATE headwater.shard SET {change} WHERE id = 2")
        with pytest.raises(StorageError, match=re.escape(reason)):
            copy_into_cluster(source, "file-durable", settings)
    with connect(settings.cluster.postgres_url, "test") as connection:
        connection.execute("UPDATE headwater.shard SET seq = 0")
    stores[f"{COLD}/shard-001"].put("packs/other", b"of something else")
    with pytest.raises(StorageError, match="shard-001 has objects"):
        copy_into_cluster(source, "file-durable", settings)
    assert stores[f"{COLD}/shard-001"].get("packs/other") is not None


def test_interrupted_copy_keeps_nodes_from_starting_and_can_be_repeated(
    source: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = copying._upload
    left = iter(range(2))

    def interrupted(*arguments: object) -> None:
        if next(left, None) is None:
            raise StorageError("the plug was pulled")
        upload(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(copying, "_upload", interrupted)
        with pytest.raises(StorageError, match="the plug was pulled"):
            copy_into_cluster(source, "file-durable", settings)
    with pytest.raises(StorageError, match="such a copy was interrupted"):
        open_cluster(settings)
    copy_into_cluster(source, "file-durable", settings)
    assert open_cluster(settings).shards == SHARDS


def test_shard_is_fetched_again_if_its_owner_trims_the_journal_meanwhile(
    source: Path, settings: Settings, stores: dict[str, ObjectStoreObjects], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_into_cluster(source, "file-durable", settings)
    restored: list[object] = []

    def restoring(*arguments: object) -> None:
        restore_replicated(*arguments)  # type: ignore[arg-type]
        restored.append(arguments)
        if len(restored) == 1:
            # The owner takes the shard in this moment: HEAD is another one.
            home = ClaimedPrefix(stores[f"{COLD}/shard-000"])
            assert home.head is not None
            home._put(home.head)

    monkeypatch.setattr(copying, "restore_replicated", restoring)
    with fetched_cluster(settings) as fetched:
        assert len(restored) == SHARDS + 1
        assert list(check(fetched)) == []


def test_database_without_a_cluster_is_reported(settings: Settings) -> None:
    with pytest.raises(StorageError, match="There is no cluster in the database"), fetched_cluster(settings):
        pass


def test_state_over_http_has_the_figures_of_the_shards_that_answer(source: Path, settings: Settings) -> None:
    copy_into_cluster(source, "file-durable", settings)
    with connect(settings.cluster.postgres_url, "test") as connection:
        connection.execute("UPDATE headwater.shard SET epoch = 2, owner = 'n#1' WHERE id = 0")
    opened = open_shard(settings, 0, SHARDS, 2, 64, lambda: True)
    storage = opened.storage
    assert isinstance(storage, JournaledStorage)
    for _ in storage.recover():
        pass

    async def scene() -> dict[str, Any]:
        page = StatusPage(settings, Relay(Peers(0, SHARDS), asyncio.get_running_loop(), 1.0), opened)
        found: dict[str, Any] = json.loads((await page._answer()).body)["cluster"]
        return found

    with closing(storage):
        found = asyncio.run(scene())
        assert storage._journal is not None
        journal = storage._journal.replica
    assert isinstance(journal, PostgresJournal)
    journal.close()
    assert found.keys() == STATE.keys()
    assert STATE["nodes"][0].keys() == set(NodeStatus.__struct_fields__)
    first, *others = found["shards"]
    assert first.keys() == STATE["shards"][0].keys()
    assert (first["owner"], first["epoch"]) == ("n", 2)
    assert first["figures"].keys() == FIGURES.keys()
    assert first["figures"]["cold_bytes"] > 0
    assert [shard["figures"] for shard in others] == [None] * (SHARDS - 1)
