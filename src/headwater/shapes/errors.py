"""What can be wrong with a request or with what a shape depends on. The API renders each in Electric's form."""

from __future__ import annotations


class ShapeError(Exception):
    """The base of all errors here."""


class InvalidShapeError(ShapeError):
    """A request that can never work: 400, with the parameter and the reason."""

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(f"{parameter}: {reason}")
        self.parameter = parameter
        self.reason = reason


class UnavailableError(ShapeError):
    """Postgres or the stream server cannot be used, or a limit is reached: 503, try again later."""

    def __init__(self, reason: str, retry_after_s: int = 1) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ShapeGoneError(ShapeError):
    """The shape was dropped while a request used it: the reader must fetch the new one."""
