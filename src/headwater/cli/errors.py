"""Exit codes and the exception that ends a command with one line on stderr."""

from __future__ import annotations

USAGE = 2
RUNTIME = 1


class CommandError(Exception):
    """The command failed. `main` prints the message on one line and exits with the code."""

    def __init__(self, message: str, code: int = RUNTIME) -> None:
        super().__init__(message)
        self.code = code
