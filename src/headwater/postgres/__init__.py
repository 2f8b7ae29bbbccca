"""Postgres as the pipeline meets it: logical decoding, replication slots, snapshots and sink tables."""
