"""Streams in a lake: every message once, in Parquet files that a manifest or a Delta log names.

Invariant: what is in the lake is what a committed batch named. Files that no commit names are nobody's, and are swept.
"""
