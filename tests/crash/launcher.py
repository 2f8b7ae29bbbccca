"""Starts servers for crash tests, one after the other, fast: everything is imported once, then every server is a fork.

    python -m tests.crash.launcher LOG [FAULT]

Reads lines from stdin, answers each with one line on stdout:

    start   a server in a forked process: all of it but the time that Python takes to import; with a number, its wall
            clock is that many seconds ahead
    exec    a server as a user starts it: a new interpreter
    look    answers `runs`, or `ended CODE`
    kill    SIGKILL to the server; answers `killed`, or `ended CODE` if it had ended by itself
    stop    SIGTERM; answers `ended CODE`

A FAULT (see `faults`) makes it a deliberately broken server, for which the checks must find words. The launcher ends
with its stdin, and takes the server with it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from headwater.cli import main
from headwater.http import server as _imported_once  # noqa: F401
from tests.crash.faults import FAULTS

ARGUMENTS = ["serve", "--port", os.environ.get("CRASH_PORT", "0")]


def run_child(log: Path, *, anew: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    for number, target in ((null, 0), (null, 1), (descriptor, 2)):
        os.dup2(number, target)
    if anew:
        os.execv(sys.executable, [sys.executable, "-m", "headwater", *ARGUMENTS])
    main(ARGUMENTS)


def shift_clock(seconds: float) -> None:
    """Wall time as another machine might have it; the monotonic clock is left alone."""
    wall = time.time
    time.time = lambda: wall() + seconds


def look(pid: int) -> str:
    done, status = os.waitpid(pid, os.WNOHANG)
    return how_it_ended(status) if done else "runs"


def end(pid: int, number: signal.Signals) -> str:
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        os.kill(pid, number)
        _, status = os.waitpid(pid, 0)
    return how_it_ended(status)


def how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"ended by signal {os.WTERMSIG(status)}"
    return f"ended {os.waitstatus_to_exitcode(status)}"


def launch(log: Path) -> None:
    pid = 0
    try:
        for line in sys.stdin:
            command, *arguments = line.split()
            if command in {"start", "exec"}:
                assert not pid
                pid = os.fork()
                if not pid:
                    try:
                        if arguments:
                            shift_clock(float(arguments[0]))
                        run_child(log, anew=command == "exec")
                    except SystemExit as exit_:
                        sys.stderr.flush()
                        os._exit(exit_.code if isinstance(exit_.code, int) else 1)
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        os._exit(70)
                answer = f"started {pid}"
            elif command == "look":
                answer = look(pid)
                pid = pid if answer == "runs" else 0
            else:
                number = signal.SIGKILL if command == "kill" else signal.SIGTERM
                answer, pid = end(pid, number), 0
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        FAULTS[sys.argv[2]]()
    # What was imported is the same for every server: none of them need look through it again.
    gc.collect()
    gc.freeze()
    launch(Path(sys.argv[1]))
