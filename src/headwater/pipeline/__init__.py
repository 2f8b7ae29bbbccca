"""The jobs that move and derive data in bulk, each a Spark query: to and from Postgres, folds and archives.

Invariant: a job keeps no state of its own outside its checkpoint and its targets, so it may be killed at any time.
"""
