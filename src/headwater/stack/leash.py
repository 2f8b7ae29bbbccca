"""Becomes another program that cannot outlive whoever started it. Run as a script, in front of each part's command.

    python leash.py PARENT_PID DEATH_SIGNAL UID GID COMMAND …

It drops to the given user (`-1` stays), asks the kernel for the signal upon its parent's death, and executes the
command in its place. Invariant: the parent either sees the program or is gone and no program runs. It imports nothing
of ours, because a user that it drops to may not be able to read it.
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
        # After the change of user, which would clear it again.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("headwater: whoever started this part is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
