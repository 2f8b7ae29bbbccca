"""What can go wrong between Spark and a stream: each error says which stream, which offset, and what to do.

Invariant: a message is complete by itself, because Spark hands over nothing but its text.
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """Everything that this package raises on purpose."""


class OptionError(HeadwaterError):
    """An option that is unknown, missing, or has a value that makes no sense."""


class ServerUnreachable(HeadwaterError):
    """No usable answer within the time allowed for retries."""


class ServerRefused(HeadwaterError):
    """An answer that says no."""

    def __init__(self, message: str, *, status: int, code: str = "", earliest: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.earliest = earliest
        """Where the stream begins, on servers that say so when an offset is gone."""


class StreamMissing(ServerRefused):
    """There is no such stream: never created, deleted or expired."""


class OffsetGone(ServerRefused):
    """The data at this offset is no longer retained."""


class StreamRecreated(OffsetGone):
    """The offset belongs to a stream that was deleted; the name has a new one."""


class Fenced(ServerRefused):
    """A newer batch of the same query has written already: this task is a leftover."""


class BatchSupersededError(HeadwaterError):
    """Another driver has completed this batch and staged a later one."""


class DifferingRetry(HeadwaterError):
    """A retry brought other bytes than the ones that the stream took the first time."""


class DataShorterThanPlanned(HeadwaterError):
    """A stream ends before the offset that the checkpoint names: it was deleted and created anew."""


class BadRecord(HeadwaterError):
    """A message that does not fit the schema, where no column takes such messages."""


class BadRow(HeadwaterError):
    """A row that cannot be appended as it is."""
