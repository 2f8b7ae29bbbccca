"""Turn the stderr output of Spark's processes into lines of our log, with timestamps and without harmless tracebacks.

The JVM and the Python workers inherit stderr and write freely to it: banners, stack traces, and a traceback of
pyspark's daemon or of its accumulators whenever Spark closes a socket that it no longer needs (`BrokenPipeError`,
`EOFError`), which is normal. Invariant: every line is logged with a timestamp, unless it belongs to such a traceback or
is a separator line around one.
"""

from __future__ import annotations

import os
import re
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_OURS: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
_LOG4J: Final = re.compile(r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d ")
_BANNER: Final = re.compile(
    r"WARNING: Using incubator modules|Using Spark's default log4j profile|Setting default log level to"
    r"|To adjust logging level use|Setting Spark log level to|.* WARN NativeCodeLoader: "
)
"""What Spark prints at every start."""
_BEGIN: Final = "Traceback (most recent call last):"
_PREAMBLES: Final = ("PySpark daemon failed to flush", "Exception occurred during processing of request from")
_RULE: Final = "-" * 40
"""Lines that the standard library's server prints before and after such a traceback."""
_CLOSED: Final = ("BrokenPipeError:", "ConnectionResetError:", "EOFError")
_SOCKETS: Final = re.compile(r'  File ".*(?:pyspark/(?:daemon|accumulators|serializers)|/socketserver)\.py", line \d+')
"""The files of pyspark that talk to the JVM over a socket, and the standard library's server that one of them uses."""
_HOLD_BACK_S: Final = 1.0
_BLOCK_LINES_MAX: Final = 500
_CHUNK_BYTES: Final = 65536


class StderrLines:
    """A filter for lines. Tracebacks are held back until they are complete, or until `flush`."""

    def __init__(self) -> None:
        self._block: list[str] = []
        self._open = 0
        """Number of incomplete tracebacks in the block: those of two workers may be interleaved."""

    @property
    def has_pending(self) -> bool:
        return bool(self._block)

    def feed(self, line: str) -> list[str]:
        if line == _RULE or _BANNER.match(line):
            return []
        if line == _BEGIN or line.startswith(_PREAMBLES):
            self._block.append(line)
            self._open += line == _BEGIN
            return []
        if not self._block:
            return [_timed(line)] if line.strip() else []
        if _OURS.match(line) or _LOG4J.match(line):
            return [_timed(line)]  # From another process; the traceback continues.
        self._block.append(line)
        if line and not line[0].isspace():
            self._open -= 1
        is_whole = self._open <= 0 and any(held == _BEGIN for held in self._block)
        return self.flush() if is_whole or len(self._block) > _BLOCK_LINES_MAX else []

    def flush(self) -> list[str]:
        block, self._block, self._open = self._block, [], 0
        return [] if _is_closed_socket(block) else [_timed(line, "ERROR") for line in block if line.strip()]


def _is_closed_socket(block: list[str]) -> bool:
    files = [line for line in block if line.startswith("  File ")]
    starts = (_BEGIN, *_PREAMBLES)
    ends = [line for line in block if line and not line[0].isspace() and not line.startswith(starts)]
    return bool(files and ends) and all(map(_SOCKETS.match, files)) and all(end.startswith(_CLOSED) for end in ends)


def _timed(line: str, level: str = "INFO") -> str:
    if _OURS.match(line) or _LOG4J.match(line):
        return line
    moment = time.time()
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    return f"{written},{int(moment * 1000) % 1000:03d} {level} spark: {line}"


@contextmanager
def tidy_stderr(*, on_terminal: bool = False) -> Iterator[None]:
    """Within the block, pass stderr of this process and its children through `StderrLines`.

    A terminal is left alone unless `on_terminal` says otherwise: programs behave differently on one.
    """
    if sys.stderr.isatty() and not on_terminal:
        yield
        return
    sys.stderr.flush()
    out = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)
    copier = threading.Thread(target=_copy, args=(read, out), name="stderr-lines", daemon=True)
    copier.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(out, 2)
        # A child that still runs keeps the pipe open; its output is copied until it exits.
        copier.join(_HOLD_BACK_S)


def _copy(read: int, out: int) -> None:
    lines, rest = StderrLines(), b""
    while True:
        ready, _, _ = select.select([read], [], [], _HOLD_BACK_S if lines.has_pending else None)
        if not ready:
            _write(out, lines.flush())
            continue
        chunk = os.read(read, _CHUNK_BYTES)
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            _write(out, lines.feed(line.decode("utf-8", "replace")))
        if not chunk:
            _write(out, [*(lines.feed(rest.decode("utf-8", "replace")) if rest else []), *lines.flush()])
            return


def _write(out: int, lines: list[str]) -> None:
    if lines:
        os.write(out, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
