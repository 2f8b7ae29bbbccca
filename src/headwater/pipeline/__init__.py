"""Jobs that move and derive data in bulk, each as a Spark query: to and from Postgres, folds and archives.

Invariant: a job keeps no state outside its checkpoint and its targets, so it can be killed at any time.
"""
