"""Tiering: packs and blobs are stored in an object store, and the local disk is a bounded cache."""
