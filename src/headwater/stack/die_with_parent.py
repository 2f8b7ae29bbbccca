"""Exec a program that dies with its parent.

    python die_with_parent.py PARENT_PID DEATH_SIGNAL UID GID COMMAND …

The supervisor starts every service through this script. The script switches to the given user (`-1` keeps the current
user), asks the kernel to send the signal when the parent dies, and executes the command. Invariant: if the parent has
already died, the command is not started. The script imports nothing from the package, because the user that it
switches to may not have permission to read it.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, death_signal, uid, gid = (int(argument) for argument in sys.argv[1:5])
    command = sys.argv[5:]
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if sys.platform == "linux":
        # After the change of user, because that change clears the setting.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("headwater: the supervisor has ended; this service is not started")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
