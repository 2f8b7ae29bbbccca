"""The current state of streams of changes: what each key holds after the last operation on it, as table and snapshot.

Invariant: a fold is a pure function of the messages before an offset. Where it began, in how many batches it came and
how often it was killed on the way never shows in its bytes.
"""
