"""Divide a data directory between workers without serving it, and end the process, or fail, at a chosen step.

    python -m tests.cluster.interrupted_divisions DIRECTORY MODE WORKERS STEP HOW

A step is a call that creates, opens for writing, renames or removes a file or directory. The chosen one ends the
process with SIGKILL before it is performed (`kill`), or fails because the disk is full (`fail`). With step 0 none does.
A division that is not interrupted reports the number of its steps to stderr.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any, Final

from headwater.cluster import start
from headwater.config import ServerSettings, Settings, StorageSettings
from headwater.storage.interface import StorageError

_CHANGES: Final = frozenset(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate"))
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Steps:
    """Counts the steps of this process, and interrupts it at one of them."""

    def __init__(self, step: int, how: str) -> None:
        self.count = 0
        self._step = step
        self._how = how

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _CHANGES and not (event == "open" and arguments[2] & _WRITING):
            return
        self.count += 1
        if self.count == self._step:
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main() -> int:
    directory, mode, workers, step, how = sys.argv[1:]
    settings = Settings(
        server=ServerSettings(workers=int(workers)),
        storage=StorageSettings.model_validate({"mode": mode, "data_dir": directory}),
    )
    served = SimpleNamespace(run=lambda: None)
    vars(start)["WorkerSupervisor"] = lambda *_: served
    steps = Steps(int(step), how)
    sys.addaudithook(steps.audit)
    try:
        start.start_server(settings, lambda: settings)
    except (StorageError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write(f"steps={steps.count}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
