"""Ctrl-C that ends a blocking call at once.

Python checks for signals between instructions, and a signal interrupts a system call that has begun. One that arrives
after the last check and before the call blocks is seen only when the call returns: on a quiet stream minutes later. A
thread that is woken by every signal therefore interrupts the main thread until it has seen Ctrl-C. Invariant:
when the block is left, signals are handled as before.
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
"""Ignored by default and not used elsewhere: it only interrupts a system call."""
_NUDGE_INTERVAL_S: Final = 0.05
_REPEAT_AFTER_S: Final = 2.0
"""An interrupt may be raised where exceptions are dropped, such as in `__del__`; so long the block may take to end."""


@contextmanager
def prompt_interrupts() -> Iterator[None]:
    """Within the block, raise KeyboardInterrupt soon after Ctrl-C, whatever the main thread is doing."""
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
    """Signals are for the main thread, whose system call they interrupt; a thread inherits the mask of its starter."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, _NUDGE})
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Handled, so that a system call is interrupted, and nothing more."""
