"""Ctrl-C at the worst times: not noticed by a blocking call, or raised where exceptions are dropped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

BLOCKED_SECS = 120
NOT_NOTICED = f"""
import signal, socket, threading, time
from headwater.cli.interrupts import prompt_interrupts

# Another thread receives the signal, so that the main thread's call continues: the same as when the signal arrives just
# before the call blocks, which a test cannot time.
threading.Thread(target=time.sleep, args=({BLOCKED_SECS},), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
ours, theirs = socket.socketpair()
ours.settimeout({BLOCKED_SECS})
with prompt_interrupts():
    print("blocks", flush=True)
    ours.recv(1)
"""
DROPPED = f"""
import time
from headwater.cli.interrupts import prompt_interrupts

class Dropping:
    def __del__(self):
        print("blocks", flush=True)
        time.sleep({BLOCKED_SECS})

with prompt_interrupts():
    Dropping()
    time.sleep({BLOCKED_SECS})
"""
AFTERWARDS = """
import signal
from headwater.cli.interrupts import prompt_interrupts

before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGURG)
with prompt_interrupts():
    assert signal.getsignal(signal.SIGINT) is not before[0]
assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGURG)) == before
assert signal.set_wakeup_fd(-1) == -1
signal.signal(signal.SIGINT, signal.SIG_IGN)
with prompt_interrupts():
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""


def interrupted(script: str) -> tuple[float, str]:
    """How long the script took to end after Ctrl-C, and its output."""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "blocks\n"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=BLOCKED_SECS / 2)
        return time.monotonic() - began, said
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_that_a_blocking_call_misses_ends_the_block() -> None:
    took, said = interrupted(NOT_NOTICED)
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert took < BLOCKED_SECS / 4


def test_ctrl_c_that_is_dropped_is_raised_again() -> None:
    took, said = interrupted(DROPPED)
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert took < BLOCKED_SECS / 4


def test_signal_handlers_are_restored_and_ignored_signals_stay_ignored() -> None:
    subprocess.run([sys.executable, "-c", AFTERWARDS], check=True, timeout=60)
