"""Start servers for crash tests quickly: import everything once, then fork a process for every server.

    python -m tests.crash.launcher LOG [FAULT]

Reads lines from stdin, answers each with one line on stdout:

    start   start a server in a forked process, which skips the imports; with a number, its wall clock is that many
            seconds ahead
    exec    start a server in a new interpreter, as a user does
    status  answer `running` or `ended CODE`
    kill    send SIGKILL to the server; answer `killed`, or `ended CODE` if it had already ended
    stop    send SIGTERM; answer `ended CODE`

With a FAULT (see `faults`) the server is deliberately broken, and the checks must detect it. The launcher ends when its
stdin is closed, and kills the server.
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


def run_child(log: Path, *, new_interpreter: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    for number, target in ((null, 0), (null, 1), (descriptor, 2)):
        os.dup2(number, target)
    if new_interpreter:
        os.execv(sys.executable, [sys.executable, "-m", "headwater", *ARGUMENTS])
    main(ARGUMENTS)


def shift_clock(seconds: float) -> None:
    """Set the wall clock ahead; the monotonic clock stays as it is."""
    wall = time.time
    time.time = lambda: wall() + seconds


def current_status(pid: int) -> str:
    done, status = os.waitpid(pid, os.WNOHANG)
    return describe_exit(status) if done else "running"


def end(pid: int, number: signal.Signals) -> str:
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        os.kill(pid, number)
        _, status = os.waitpid(pid, 0)
    return describe_exit(status)


def describe_exit(status: int) -> str:
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
                        run_child(log, new_interpreter=command == "exec")
                    except SystemExit as exit_:
                        sys.stderr.flush()
                        os._exit(exit_.code if isinstance(exit_.code, int) else 1)
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        os._exit(70)
                answer = f"started {pid}"
            elif command == "status":
                answer = current_status(pid)
                pid = pid if answer == "running" else 0
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
    # The imported modules are shared by all servers: keep their garbage collectors from scanning them again.
    gc.collect()
    gc.freeze()
    launch(Path(sys.argv[1]))
