"""Exec a program that dies with its parent.

    python die_with_parent.py PARENT_PID DEATH_SIGNAL UID GID COMMAND …

The supervisor starts every service through this script. The script switches to the given user (`-1` keeps the current
user), asks the kernel to send the signal when the parent dies, and executes the command. Where the kernel cannot do
that (macOS), the script stays and watches the parent. Invariant: if the parent has already died, the command is not
started. The script imports nothing from the package, because the user that it switches to may not have permission to
read it; the package imports it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1
_WATCH_EVERY_S = 0.5
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def main() -> None:
    parent, death_signal, uid, gid = (int(argument) for argument in sys.argv[1:5])
    command = sys.argv[5:]
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if sys.platform == "linux":
        # After the change of user, because that change clears the setting.
        signal_at_death_of_parent(death_signal)
    if os.getppid() != parent:
        sys.exit("headwater: the supervisor has ended; this service is not started")
    if sys.platform == "linux":
        os.execvp(command[0], command)
    sys.exit(run_and_watch(command, parent, death_signal))


def signal_at_death_of_parent(death_signal: int) -> None:
    """Ask the kernel of Linux to send this process the signal when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)


def wrapped(death_signal: int, owner: tuple[str, str], command: list[str]) -> list[str]:
    """A command line that runs a command through this script as a user; the signal is sent when this process dies."""
    script = (sys.executable, "-I", "-S", __file__, str(os.getpid()), str(death_signal))
    return [*script, *owner, *command]


def run_and_watch(command: list[str], parent: int, death_signal: int) -> int:
    """Run the command as a child, and send it the signal when the parent is gone; returns its exit code."""
    child = subprocess.Popen(command)

    def forward(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    while True:
        try:
            code = child.wait(_WATCH_EVERY_S)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                child.send_signal(death_signal)
                parent = os.getppid()


if __name__ == "__main__":
    main()
