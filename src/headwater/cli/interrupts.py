"""Make Ctrl-C end a blocking call immediately.

Python checks for signals between instructions, and a signal interrupts a blocking system call. A signal that arrives
after the last check and before the call blocks is noticed only when the call returns: on a quiet stream, minutes later.
Therefore a thread that every signal wakes up interrupts the main thread until it has noticed Ctrl-C. Invariant: after
the block, signals are handled as before.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_NUDGE: Final = signal.SIGURG
"""A signal that is ignored by default and not used elsewhere; it only interrupts system calls."""
_NUDGE_INTERVAL_S: Final = 0.05
_REPEAT_AFTER_S: Final = 2.0
"""How long the block may take to end before Ctrl-C is raised again: Python drops exceptions in `__del__`."""


@contextmanager
def prompt_interrupts() -> Iterator[None]:
    """Within the block, raise KeyboardInterrupt promptly after Ctrl-C, whatever the main thread is doing."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # Another handler decides what Ctrl-C does, or it is ignored (nohup).
        return
    seen, left = threading.Event(), threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.set()
        signal.default_int_handler(number, frame)

    wakes, wake = socket.socketpair()
    wake.setblocking(False)
    watcher = threading.Thread(target=_watch, args=(wakes, threading.get_ident(), seen, left), daemon=True)
    handlers = {_NUDGE: signal.signal(_NUDGE, _nothing)}
    before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    _start_without_signals(watcher)
    handlers[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        wake.close()
        watcher.join()
        wakes.close()


def _watch(wakes: socket.socket, main_thread: int, seen: threading.Event, left: threading.Event) -> None:
    while numbers := wakes.recv(64):
        if signal.SIGINT not in numbers:
            continue
        while not left.is_set():
            while not seen.wait(_NUDGE_INTERVAL_S) and not left.is_set():
                signal.pthread_kill(main_thread, _NUDGE)
            if not left.wait(_REPEAT_AFTER_S):
                seen.clear()
                os.kill(os.getpid(), signal.SIGINT)


def _start_without_signals(thread: threading.Thread) -> None:
    """Start a thread with all signals blocked, so that signals interrupt system calls of the main thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, _NUDGE})
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: having a handler is enough for the signal to interrupt a system call."""
