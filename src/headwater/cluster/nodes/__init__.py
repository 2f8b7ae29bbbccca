"""Several machines as one server: Postgres is the journal and decides who owns what, an object store has the packs."""
