"""Several processes as one server: shards, their owners, and how a request reaches the owner of its stream."""
