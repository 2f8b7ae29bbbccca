"""Shards: the hash of a name determines its shard, and each shard has one worker as its owner.

The number of shards is fixed when a store is created, so the shard of a name never changes; the owner of a shard
depends on the number of workers. Streams of a bucket are in the shard of their bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from headwater.core.buckets import BUCKET_ROOT, ids_of, is_bucketed
from headwater.engine.registry import REGISTRY_NAME

COORDINATOR: Final = 0
"""The worker that owns shard 0: it has the subscriptions, the registry and the listing of all streams."""
OWNERS_CACHE_MAX: Final = 65_536


@dataclass(frozen=True, slots=True)
class ShardMap:
    shards: int
    workers: int

    def shard_of(self, name: str) -> int:
        """The shard of a stream, by its canonical name."""
        return self.shard_of_bucket(ids_of(name)[0]) if is_bucketed(name) else self._hashed(name)

    def shard_of_bucket(self, bucket_id: str) -> int:
        return self._hashed(BUCKET_ROOT + bucket_id)

    def owner_of(self, name: str) -> int:
        """The worker that owns the shard of a stream."""
        return self.owner_of_shard(self.shard_of(name))

    def owner_of_bucket(self, bucket_id: str) -> int:
        return self.owner_of_shard(self.shard_of_bucket(bucket_id))

    def owner_of_shard(self, shard: int) -> int:
        return shard % self.workers

    def shards_of(self, worker: int) -> tuple[int, ...]:
        return tuple(range(worker, self.shards, self.workers))

    def _hashed(self, key: str) -> int:
        if key == REGISTRY_NAME:
            return 0
        digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.shards
