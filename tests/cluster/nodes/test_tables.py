"""What counts as growth of a cluster's tables."""

from __future__ import annotations

import pytest

from tests.cluster.nodes import tables


def samples(**per_minute: float) -> list[dict[str, float]]:
    """Half an hour: the shard's table is small, the journal is filled and emptied every minute."""
    found = []
    for minute in range(1, 31):
        journal = 20_000.0 + 3_000.0 * (minute % 3)
        sizes = {"shard, table": 112.0, "shard, index": 16.0, "journal, table": journal, "journal, index": 400.0}
        grown = {name: size + per_minute.get(name, 0.0) * minute for name, size in sizes.items()}
        found.append({"minute": float(minute), "appends": 9_000.0 * minute, **grown})
    return found


def test_tables_that_are_filled_and_emptied_do_not_grow() -> None:
    found, growing = tables.judge(samples())
    assert growing == []
    assert found["shard, table"] == {"first": 112.0, "middle": 112.0, "last": 112.0}
    assert found["appends"]["last"] == 81_000.0


@pytest.mark.parametrize(
    ("name", "per_minute"),
    [("shard, table", 24.0), ("shard, index", 10.0), ("journal, table", 500.0), ("journal, index", 20.0)],
)
def test_growth_is_reported(name: str, per_minute: float) -> None:
    """For the table of shards, what it grew by at this rate before it was vacuumed often enough."""
    _, growing = tables.judge(samples(**{name: per_minute}))
    assert [each.partition(" grew")[0] for each in growing] == [name]


def test_journal_of_a_higher_rate_may_be_larger_but_not_the_table_of_shards() -> None:
    faster = samples()
    for each in faster[20:]:
        each["appends"] = faster[19]["appends"] + (each["minute"] - 20) * 18_000.0
        each["journal, table"] *= 2
    assert tables.judge(faster)[1] == []
    for each in faster[20:]:
        each["shard, table"] *= 2
    assert [each.partition(" grew")[0] for each in tables.judge(faster)[1]] == ["shard, table"]
