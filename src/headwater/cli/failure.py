"""How a command ends badly: one sentence and an exit code."""

from __future__ import annotations

USAGE = 2
RUNTIME = 1


class Failure(Exception):
    """The command cannot go on. `main` prints the sentence and exits with the code."""

    def __init__(self, sentence: str, code: int = RUNTIME) -> None:
        super().__init__(sentence)
        self.code = code
