"""Tiering: the packs and blobs of a data directory go to an object store, and the local disk is a bounded cache."""
