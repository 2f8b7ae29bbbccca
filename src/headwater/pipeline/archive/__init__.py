"""Archives: every message of some streams, once, in a Delta table.

Invariant: the archive holds what its committed batches named. Files that no commit names are ignored by readers and
deleted by vacuum.
"""
