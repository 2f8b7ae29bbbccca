"""A warm standby of a shard: it has the owner's state at every record, and takes over without loading anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from headwater.cluster.nodes import schema
from headwater.cluster.nodes.schema import connect
from headwater.cluster.nodes.standby import StandbyJournal
from headwater.core.records import ForkPoint
from headwater.stack.database import LocalPostgres
from headwater.storage.tiering.standby_store import OutdatedError
from tests.cluster.nodes.test_replicated_store import LARGE, Shard
from tests.storage.acid.driver import messages_of
from tests.storage.tiering.driving import TieredRun
from tests.storage.tiering.objects import SwitchedObjects, memory_objects
from tests.waiting import wait_until


def nothing() -> None:
    """A step in which only the journal is read."""


@pytest.fixture
def objects() -> SwitchedObjects:
    return SwitchedObjects(memory_objects())


@pytest.fixture
def store(single: LocalPostgres, shard: int, tmp_path: Path, objects: SwitchedObjects) -> Shard:
    return Shard(single, shard, tmp_path, objects)


def content(run: TieredRun) -> dict[str, list[bytes]]:
    return {stream.name: messages_of(run.storage, stream) for stream in run.driver.catalog}


def test_standby_takes_over_without_reading_what_it_has(store: Shard, objects: SwitchedObjects) -> None:
    with store.opened(1) as owner:
        stream = owner.driver.create("s", LARGE)
        owner.store()

        def write(message: bytes) -> Callable[[], None]:
            def step() -> None:
                owner.driver.append(stream, [message])
                owner.driver.commit()

            return step

        script = [nothing, write(b"one"), write(b"two"), nothing, objects.asked.clear, write(b"not read yet")]
        with store.followed(2, script) as heir:
            loaded = {key for what, key in objects.asked if what in ("get", "read")}
            assert content(heir) == {"s": [*LARGE, b"one", b"two", b"not read yet"]}
            assert loaded == {"HEAD"}, "neither the manifest nor a pack is read again"
            again = heir.driver.catalog.by_id[stream.id]
            heir.driver.append(again, [b"of the heir"])
            heir.store()
    with store.opened(3) as run:
        assert content(run) == {"s": [*LARGE, b"one", b"two", b"not read yet", b"of the heir"]}


@pytest.mark.parametrize("is_noticed", [True, False])
def test_standby_continues_from_the_manifest_that_the_owner_stored_last(
    store: Shard, objects: SwitchedObjects, is_noticed: bool
) -> None:
    """Also if it was stored just before the end. The packs of the former manifest are gone by then."""
    with store.opened(1, grace_s=0.0, keep_s=60.0) as owner:
        gone = owner.driver.create("gone", LARGE)
        owner.store()
        (pack,) = objects.sizes("packs/")
        kept = owner.driver.create("kept", LARGE)
        owner.store()

        def replace_packs() -> None:
            owner.driver.delete(gone)
            owner.driver.append(kept, [b"more"])
            owner.store()
            owner.tidy()
            wait_until(lambda: pack not in objects.sizes("packs/"), what="the end of the pack")

        script = [nothing, replace_packs, *([nothing] * is_noticed)]
        with store.followed(2, script, head_s=0.0 if is_noticed else 3600.0) as heir:
            assert content(heir) == {"kept": [*LARGE, b"more"]}
            heir.driver.append(heir.driver.catalog.by_id[kept.id], [b"of the heir"])
            heir.store()
    with store.opened(3) as run:
        assert content(run) == {"kept": [*LARGE, b"more", b"of the heir"]}


def test_standby_that_missed_batches_begins_again(store: Shard) -> None:
    """The owner has stored and trimmed more than the standby has read."""
    with store.opened(1) as owner:
        stream = owner.driver.create("s", [b"first"])
        owner.driver.commit()

        def go_on() -> None:
            owner.driver.append(stream, LARGE)
            owner.store()

        with (
            pytest.raises(OutdatedError, match="nothing between the records"),
            store.followed(2, [nothing, go_on, nothing], head_s=3600.0),
        ):
            pass


def lose_last_batch(single: LocalPostgres, shard: int) -> None:
    """What a promoted standby of Postgres may be without: a row that could be read, and was not acknowledged."""
    with connect(single.url, "test") as connection:
        connection.execute(
            "WITH lost AS (DELETE FROM headwater.journal WHERE shard = %(shard)s"
            " AND seq = (SELECT seq FROM headwater.shard WHERE id = %(shard)s) RETURNING seq)"
            " UPDATE headwater.shard SET seq = lost.seq - 1 FROM lost WHERE id = %(shard)s",
            {"shard": shard},
        )


@pytest.mark.parametrize("is_checked", [True, False])
def test_standby_begins_again_when_postgres_has_another_timeline(
    store: Shard, single: LocalPostgres, shard: int, monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    """The next owner has written another batch with the number of one that was lost. The broken variant, which does not
    compare timelines, has the lost one."""
    if not is_checked:
        monkeypatch.setattr(StandbyJournal, "check_timeline", lambda _: None)
    with store.opened(1) as owner, ExitStack() as stack:
        stream = owner.driver.create("s", [b"first"])
        owner.driver.commit()
        owner.driver.append(stream, [b"read, and lost with the primary"])
        owner.driver.commit()

        def promote() -> None:
            lose_last_batch(single, shard)
            with store.opened(2) as other:
                other.driver.append(other.driver.catalog.by_id[stream.id], [b"of the next owner"])
                other.driver.commit()
            monkeypatch.setattr(schema._newest, "timeline", schema._newest.timeline + 1)
            monkeypatch.setattr(schema, "_timeline", lambda _: schema._newest.timeline)

        if is_checked:
            stack.enter_context(pytest.raises(OutdatedError, match="Another server of Postgres is the primary"))
        with store.followed(3, [nothing, promote]) as stale:
            end = stale.driver.catalog.by_id[stream.id].byte_position
            assert end == len(b"first" + b"read, and lost with the primary")
    with store.opened(4) as run:
        assert content(run) == {"s": [b"first", b"of the next owner"]}


def test_standby_of_a_journal_that_went_back_begins_again(store: Shard, single: LocalPostgres, shard: int) -> None:
    with store.opened(1) as owner:
        stream = owner.driver.create("s", [b"first"])
        owner.driver.commit()
        owner.driver.append(stream, [b"second"])
        owner.driver.commit()
        with (
            pytest.raises(OutdatedError, match="was read before"),
            store.followed(2, [nothing, lambda: lose_last_batch(single, shard), nothing]),
        ):
            pass


class Churn:
    """An owner that does anything, at random."""

    def __init__(self, owner: TieredRun, dice: random.Random) -> None:
        self._owner = owner
        self._dice = dice
        self._count = 0

    def step(self) -> None:
        driver, dice = self._owner.driver, self._dice
        for _ in range(dice.randrange(6)):
            self._count += 1
            alive = [stream for stream in driver.catalog if not stream.deleted]
            kind = dice.choice(("create", "append", "append", "append", "fork", "delete", "document"))
            if kind == "create" or not alive:
                driver.create(f"s{self._count}", self._messages())
                continue
            stream = dice.choice(alive)
            if kind == "append":
                driver.append(stream, self._messages(), producer=dice.choice((None, ("p", 0, self._count))))
            elif kind == "fork":
                point = ForkPoint(stream.id, stream.name, stream.message_index, stream.byte_position)
                driver.create(f"f{self._count}", self._messages(), fork=point)
            elif kind == "delete":
                driver.delete(stream)
            elif kind == "document":
                driver.document(f"d{dice.randrange(3)}", dice.choice((None, b"value")))
        driver.commit()
        done = dice.random()
        if done < 0.15:
            self._owner.store()
        elif done < 0.25:
            self._owner.store()
            self._owner.tidy()
            self._owner.store()

    def _messages(self) -> list[bytes]:
        return [b"%d" % self._count * self._dice.randrange(1, 400) for _ in range(self._dice.randrange(1, 4))]


@pytest.mark.parametrize("seed", range(4))
def test_heir_has_what_the_owner_had_whatever_it_did(store: Shard, seed: int) -> None:
    dice = random.Random(seed)
    with store.opened(1, keep_s=60.0) as first:
        churn = Churn(first, dice)
        for _ in range(5):
            churn.step()
        steps = [churn.step for _ in range(dice.randrange(5, 20))]
        with store.followed(2, steps) as heir:
            assert content(heir) == content(first)
            assert heir.driver.catalog.documents == first.driver.catalog.documents
            churn = Churn(heir, dice)
            for _ in range(6):
                churn.step()
            expected = content(heir)
    with store.opened(3) as run:
        assert content(run) == expected
        assert run.driver.catalog.documents == heir.driver.catalog.documents
