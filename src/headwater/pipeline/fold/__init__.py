"""Folds: the current state of change streams, as a Postgres table and as snapshots.

Invariant: a fold is a pure function of the messages before an offset. Its bytes do not depend on where it started, on
how the messages were split into batches, or on how often it was killed.
"""
