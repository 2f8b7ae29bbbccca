"""The cache with a limit: bounded, useful for slightly more keys than the limit, and renewed when the keys change."""

from __future__ import annotations

from headwater.http.bounded_cache import REPLACED_MAX, BoundedCache

LIMIT = 100


def hits(cache: BoundedCache[int, int], keys: range) -> int:
    """Use each key once; returns how many were cached."""
    found = 0
    for key in keys:
        if cache.get(key) == key:
            found += 1
        else:
            cache.put(key, key)
        assert len(cache) <= LIMIT
    return found


def test_keys_up_to_the_limit_are_all_cached() -> None:
    cache: BoundedCache[int, int] = BoundedCache(LIMIT)
    hits(cache, range(LIMIT))
    assert hits(cache, range(LIMIT)) == LIMIT


def test_slightly_more_keys_than_the_limit_in_turns_are_mostly_cached() -> None:
    cache: BoundedCache[int, int] = BoundedCache(LIMIT)
    keys = range(LIMIT * 5 // 4)
    assert sum(hits(cache, keys) for _ in range(20)) > 0.6 * 20 * len(keys)


def test_new_keys_replace_old_ones_after_a_while() -> None:
    cache: BoundedCache[int, int] = BoundedCache(LIMIT)
    hits(cache, range(LIMIT))
    later = range(LIMIT, 2 * LIMIT)
    for _ in range(REPLACED_MAX + 2):
        hits(cache, later)
    assert hits(cache, later) == LIMIT


def test_put_replaces_the_value_of_an_existing_key() -> None:
    cache: BoundedCache[int, int] = BoundedCache(1)
    cache.put(1, 1)
    cache.put(1, 2)
    assert cache == {1: 2}
