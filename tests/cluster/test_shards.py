"""The shard of a name is stable, streams of a bucket stay together, and every shard has one owner."""

from __future__ import annotations

from collections import Counter

from headwater.cluster.shards import COORDINATOR, ShardMap


def test_shard_of_a_name_does_not_depend_on_the_number_of_workers() -> None:
    names = [f"stream-{number}" for number in range(100)]
    shards = [ShardMap(16, workers) for workers in (1, 2, 3, 16)]
    for name in names:
        assert len({shard_map.shard_of(name) for shard_map in shards}) == 1


def test_shards_of_known_names_never_change() -> None:
    """Data directories depend on it."""
    shard_map = ShardMap(16, 2)
    assert [shard_map.shard_of(name) for name in ("a", "chat/1", "ü", "/ds/orders/x")] == [15, 1, 7, 0]


def test_streams_of_a_bucket_are_in_one_shard() -> None:
    shard_map = ShardMap(16, 3)
    assert len({shard_map.shard_of(f"/ds/orders/{number}") for number in range(50)}) == 1
    assert shard_map.shard_of("/ds/orders/1") == shard_map.shard_of_bucket("orders")


def test_names_spread_over_all_workers() -> None:
    counts = Counter(ShardMap(16, 4).owner_of(f"s{number}") for number in range(4000))
    assert sorted(counts) == [0, 1, 2, 3]
    assert min(counts.values()) > 700


def test_every_shard_has_one_owner() -> None:
    shard_map = ShardMap(16, 3)
    owned = [shard for worker in range(3) for shard in shard_map.shards_of(worker)]
    assert sorted(owned) == list(range(16))


def test_registry_belongs_to_the_coordinator() -> None:
    assert all(ShardMap(16, workers).owner_of("__registry__") == COORDINATOR for workers in range(1, 17))
