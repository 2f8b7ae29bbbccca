"""Folds: the current state of change streams, as a Postgres table and as snapshots.

Invariant: a fold is a pure function of the messages before an offset. Where it began, in how many batches it came and
how often it was killed on the way never shows in its bytes.
"""
