"""Postgres for the pipeline and the shapes: logical decoding, replication slots, first copies and sink tables."""
