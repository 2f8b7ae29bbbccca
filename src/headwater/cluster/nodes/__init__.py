"""Several machines as one server: Postgres has the journal and the ownership of shards, an object store the packs."""
