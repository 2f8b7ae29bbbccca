"""Tables into streams through the Shape API: the state, every change once, resets, and restarts."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from headwater.config import ConfigError
from headwater.pipeline import settings
from headwater.pipeline.electric import ShapesFollowed, ShapesReader
from headwater.pipeline.from_postgres import FromPostgres
from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.postgres_reader import FollowedTable
from headwater.pipeline.shape_client import ShapeClient, ShapeExpiredError, ShapePlace
from tests.pipeline.test_to_postgres import running
from tests.pipeline.waiting import eventually
from tests.shapes.serving import Shapes, shapes
from tests.spark.streams import Streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def electric() -> Iterator[Shapes]:
    with shapes("items, docs, planned, later, ranged, mixed_a, mixed_b", DS_SHAPES__SECRET="hidden") as started:
        started.http.params = started.http.params.set("secret", "hidden")
        yield started


def address(electric: Shapes) -> str:
    return electric.url.removesuffix("/v1/shape") + "?secret=hidden"


def folded(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The final state of a reader of the stream; a key that is inserted twice is an error."""
    state: dict[str, Any] = {}
    for message in messages:
        if message["headers"].get("control") == "reset":
            state.clear()
        elif message["headers"]["operation"] == "delete":
            del state[message["key"]]
        else:
            assert message["headers"]["operation"] == "update" or message["key"] not in state, f"twice: {message}"
            state[message["key"]] = message["value"]
    return state


class Batches:
    """Does what Spark does with a source, without Spark: plan, read, record the offset, repeat."""

    def __init__(self, electric: Shapes, table: FollowedTable) -> None:
        self._arguments = address(electric), ShapesFollowed((table,), idle_wait_s=0.2, wait_max_s=60.0)
        self.reader = ShapesReader(*self._arguments)
        self.offset: dict[str, Any] = self.reader.initialOffset()
        self.messages: list[dict[str, Any]] = []

    def restart(self) -> None:
        """Start a new process with the recorded offset."""
        self.reader.stop()
        self.reader = ShapesReader(*self._arguments)
        self.offset = json.loads(json.dumps(self.offset))

    def planned(self) -> dict[str, Any]:
        """The end of the next batch that is not empty."""
        while (end := self.reader.latestOffset(self.offset, ReadAllAvailable())) == self.offset:
            pass
        return end

    def read(self, end: dict[str, Any]) -> list[dict[str, Any]]:
        # Tasks get copies of the reader.
        task = pickle.loads(pickle.dumps(self.reader))
        found = []
        for partition in self.reader.partitions(self.offset, end):
            for batch in task.read(pickle.loads(pickle.dumps(partition))):
                found += [json.loads(value.as_py()) for value in batch.column("value")]
        task.stop()
        return found

    def run(self, until: Callable[[list[dict[str, Any]]], bool]) -> None:
        while not until(self.messages):
            end = self.planned()
            self.messages += self.read(end)
            self.offset = end


@pytest.fixture
def following(electric: Shapes) -> Iterator[Callable[[FollowedTable], Batches]]:
    made: list[Batches] = []

    def follow(table: FollowedTable) -> Batches:
        made.append(Batches(electric, table))
        return made[-1]

    yield follow
    for one in made:
        one.reader.stop()


def test_state_changes_reset_and_restart_without_duplicates(
    electric: Shapes, following: Callable[[FollowedTable], Batches]
) -> None:
    electric.sql("CREATE TABLE items (id int PRIMARY KEY, title text, tags text[], big bigint, data jsonb)")
    values = "i, 't' || i, '{a,b}', 9007199254740993, '{\"x\": 1}'"
    electric.sql(f"INSERT INTO items SELECT {values} FROM generate_series(1, 5000) i")
    source = following(FollowedTable("items", "el-items", "changes", cdc="electric"))
    source.run(lambda found: len(found) >= 5000)
    electric.sql("UPDATE items SET title = 'changed' WHERE id = 1")
    electric.sql("DELETE FROM items WHERE id = 2")
    source.run(lambda found: len(found) >= 5002)
    assert source.messages[0]["value"] == {
        "id": 1,
        "title": "t1",
        "tags": ["a", "b"],
        "big": 9007199254740993,
        "data": {"x": 1},
    }
    assert [one["headers"]["operation"] for one in source.messages[5000:]] == ["update", "delete"]
    assert set(source.messages[5000]["headers"]) == {"operation", "txid", "lsn"}
    # A restart continues: changes made in the meantime arrive, and nothing arrives twice.
    source.restart()
    electric.sql("INSERT INTO items (id, title) VALUES (9000, 'meanwhile')")
    source.run(lambda found: len(found) >= 5003)
    # The shape is dropped: a reset, then the new state.
    electric.sql("TRUNCATE items")
    electric.sql("INSERT INTO items (id, title) VALUES (7, 'after')")
    source.run(lambda found: list(folded(found)) == ["7"])
    assert [one["headers"] for one in source.messages[5003:]] == [{"control": "reset"}, {"operation": "insert"}]


def test_a_planned_batch_is_the_same_after_a_restart(
    electric: Shapes, following: Callable[[FollowedTable], Batches]
) -> None:
    electric.sql("CREATE TABLE planned (id int PRIMARY KEY, n int)")
    electric.sql("INSERT INTO planned SELECT i, 0 FROM generate_series(1, 100) i")
    source = following(FollowedTable("planned", "el-planned", "changes", cdc="electric"))
    source.run(lambda found: len(found) >= 100)
    electric.sql("UPDATE planned SET n = 1 WHERE id <= 10")
    end = source.planned()
    found = source.read(end)
    assert len(found) == 10
    electric.sql("UPDATE planned SET n = 2 WHERE id <= 10")
    source.restart()
    assert source.read(end) == found, "later commits are not part of it"


def test_shape_that_is_dropped_while_the_job_is_stopped_is_a_reset(
    electric: Shapes, following: Callable[[FollowedTable], Batches]
) -> None:
    electric.sql("CREATE TABLE docs (id int PRIMARY KEY)")
    electric.sql("INSERT INTO docs VALUES (1), (2)")
    source = following(FollowedTable("docs", "el-docs", "rows", cdc="electric"))
    source.run(lambda found: len(found) == 2)
    electric.sql("INSERT INTO docs VALUES (3)")
    end = source.planned()
    source.restart()
    electric.http.delete(electric.url, params={"table": "docs", "replica": "full"})
    assert source.read(end) == [], "a batch of a dropped shape cannot be read again"
    source.offset = end
    source.run(lambda found: len(found) == 6)
    assert source.messages == [{"id": 1}, {"id": 2}, {"headers": {"control": "reset"}}, {"id": 1}, {"id": 2}, {"id": 3}]


def test_without_a_snapshot_only_changes_are_published(
    electric: Shapes, following: Callable[[FollowedTable], Batches]
) -> None:
    electric.sql("CREATE TABLE later (id int PRIMARY KEY)")
    electric.sql("INSERT INTO later VALUES (1)")
    source = following(FollowedTable("later", "el-later", "rows", snapshot=False, cdc="electric"))
    source.offset = source.planned()
    electric.sql("INSERT INTO later VALUES (2)")
    source.run(bool)
    assert source.messages == [{"id": 2}]


def test_one_job_reads_a_table_from_a_slot_and_another_from_electric(
    spark: SparkSession, streams: Streams, electric: Shapes, tmp_path: Path
) -> None:
    electric.sql("CREATE TABLE mixed_a (id int PRIMARY KEY); CREATE TABLE mixed_b (id int PRIMARY KEY)")
    electric.sql("INSERT INTO mixed_a VALUES (1); INSERT INTO mixed_b VALUES (1)")
    job = FromPostgres(
        name="mixed",
        slot="mixed",
        publication="mixed",
        tables=(
            FollowedTable("mixed_a", "el-a", "rows"),
            FollowedTable("mixed_b", "el-b", "rows", cdc="electric", electric_url=address(electric)),
        ),
    )
    around = JobEnvironment(streams.root, str(tmp_path), postgres=electric.postgres.url)
    with running(spark, job, around):
        for stream in ("el-a", "el-b"):
            eventually(lambda stream=stream: len(streams.messages(stream)), lambda found: found == 1)  # type: ignore[misc]
        electric.sql("INSERT INTO mixed_a VALUES (2); INSERT INTO mixed_b VALUES (2)")
        for stream in ("el-a", "el-b"):
            eventually(lambda stream=stream: streams.messages(stream), lambda found: found == [{"id": 1}, {"id": 2}])  # type: ignore[misc]


def test_range_is_repeatable_and_a_dropped_shape_is_an_error(electric: Shapes) -> None:
    electric.sql("CREATE TABLE ranged (id int PRIMARY KEY, n int)")
    electric.sql("INSERT INTO ranged SELECT i, 0 FROM generate_series(1, 100) i")
    client = ShapeClient(address(electric), "ranged")
    try:
        snapshot, _ = client.get(ShapePlace())
        electric.sql("UPDATE ranged SET n = 1 WHERE id <= 10")
        change, cursor = client.get(snapshot.place, live=True)
        electric.sql("UPDATE ranged SET n = 2 WHERE id <= 10")
        later, _ = client.get(change.place, live=True, cursor=cursor)
        assert len(later.messages) == 10
        again = [message for part in client.between(snapshot.place, change.place) for message in part.messages]
        assert again == change.messages, "later appends are not part of the range"
        whole = [message for part in client.between(ShapePlace(), change.place) for message in part.messages]
        assert whole == snapshot.messages + change.messages
        electric.http.delete(electric.url, params={"table": "ranged", "replica": "full"})
        with pytest.raises(ShapeExpiredError):
            list(client.between(ShapePlace(), change.place))
        with pytest.raises(ShapeExpiredError):
            list(client.between(snapshot.place, change.place))
    finally:
        client.close()


def test_settings_name_the_source_of_each_table(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text('[[from_postgres]]\nname = "a"\ntables = [{table = "items", stream = "s", cdc = "electric"}]\n')
    environ = {"ELECTRIC_URL": "http://electric:3000", "ELECTRIC_SECRET": "a&b"}
    loaded = settings.load(file, environ)
    assert loaded.environment.electric == "http://electric:3000?secret=a%26b"
    assert "a&b" not in repr(loaded)
    assert [one.table for one in loaded.from_postgres[0].electric_tables] == ["items"]
    by_default = settings.load(None, {**environ, "DS_PIPELINE__CDC": "electric"})
    assert [one.table for one in by_default.from_postgres[0].electric_tables] == ["items"]
    (tmp_path / "secret").write_text("kept\n")
    kept = settings.load(file, {"ELECTRIC_URL": "http://e", "ELECTRIC_SECRET_FILE": str(tmp_path / "secret")})
    assert kept.environment.electric == "http://e?secret=kept"
    with pytest.raises(ConfigError, match="ELECTRIC_URL"):
        settings.load(file, {})
    file.write_text('[[from_postgres]]\ntables = [{table = "items", stream = "s/{key}", cdc = "electric"}]\n')
    with pytest.raises(ConfigError, match="one stream"):
        settings.load(file, environ)
