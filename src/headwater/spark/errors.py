"""Errors of the source and the sink. Each names the stream and the offset, and says what to do.

Invariant: a message is complete, because Spark reports only its text.
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """Base class of the errors of this package."""


class OptionError(HeadwaterError):
    """An option is unknown, missing, or has an invalid value."""


class TooManyDescriptorsError(HeadwaterError):
    """The process has so many open files that Spark cannot call back into it."""


class ServerUnreachableError(HeadwaterError):
    """The server returned no valid response within the time allowed for retries."""


class ServerRefusedError(HeadwaterError):
    """The server refused a request."""

    def __init__(self, message: str, *, status: int, code: str = "", earliest: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.earliest = earliest
        """The first offset that is retained, on servers that send it."""


class StreamMissingError(ServerRefusedError):
    """The stream does not exist: it was never created, was deleted, or expired."""


class DataGoneError(ServerRefusedError):
    """The data at this offset is no longer retained."""


class SourceRecreatedError(DataGoneError):
    """The offset belongs to a deleted stream; a new stream has its name."""


class BatchFencedError(ServerRefusedError):
    """A newer batch of the same query has been appended, so this batch must not be appended."""


class BatchSupersededError(HeadwaterError):
    """Another driver has completed this batch and staged a later one."""


class DifferingRetryError(HeadwaterError):
    """The rows of a retry differ from those that an earlier attempt appended."""


class DataShorterThanPlannedError(HeadwaterError):
    """A stream ends before the offset in the checkpoint: it was deleted and created again, or data was lost."""


class BadRecordError(HeadwaterError):
    """A message does not fit the schema, and the schema has no column for such messages."""


class BadRowError(HeadwaterError):
    """A row cannot be appended."""
