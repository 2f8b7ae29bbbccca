"""Storage mode `acid`: a file journal and LMDB shards. See `shard_store` for how it works, `layout` for the files."""
