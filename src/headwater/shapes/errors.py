"""The exceptions of the Shape API, which renders each in Electric's format."""

from __future__ import annotations


class ShapeError(Exception):
    """Base class of these errors."""


class InvalidShapeError(ShapeError):
    """The request is invalid: 400, with the parameter and the reason."""

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(f"{parameter}: {reason}")
        self.parameter = parameter
        self.reason = reason


class UnavailableError(ShapeError):
    """Postgres or the stream server is unavailable, or a limit is reached: 503, retry later."""

    def __init__(self, reason: str, retry_after_s: int = 1) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ShapeGoneError(ShapeError):
    """The shape was dropped while a request used it: the reader must fetch the new one."""
