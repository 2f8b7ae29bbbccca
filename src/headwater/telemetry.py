"""Logging: one handler on stderr, text or JSON lines, UTC times, levels by filter; and request ids.

Invariants: one record is one line (in text style a traceback follows), even if it contains names chosen by clients; and
nothing that logs waits for the program that reads stderr.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import re
import secrets
import select
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from headwater.config import LogFilter
from headwater.config.filters import OFF, TRACE

# Libraries that log every request at info. They are shown only if the filter names them.
_CHATTY = ("httpx", "httpcore", "asyncio")

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_STDERR: Final = 2
LOG_BACKLOG_BYTES: Final = 1024 * 1024
"""Lines that wait for a slow reader of stderr; further ones are dropped and counted."""
_PIECE_BYTES: Final = select.PIPE_BUF
"""A pipe that is writable takes this much at once."""
_LAST_LINES_S: Final = 1.0
"""How long the end of the program waits for a slow reader of stderr."""
_FLUSH_POLL_S: Final = 0.005
_LOST: Final = "%d lines were dropped because stderr was not read"


def set_up_logging(log_filter: LogFilter, style: str) -> None:
    """Send every logger to stderr in the given style (`text` or `json`), at the filter's levels."""
    logging.addLevelName(TRACE, "TRACE")
    logging.addLevelName(OFF, "OFF")
    # Do not print a traceback for each line after the reader of stderr has exited.
    logging.raiseExceptions = False
    handler = LogWriter(_STDERR)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_filter.default)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(log_filter.default, logging.WARNING))
    for name, level in log_filter.modules:
        logging.getLogger(name).setLevel(level)


def _request_ids() -> Callable[[], str]:
    # The prefix makes ids unique across restarts; creating one is cheap enough for every request.
    prefix = secrets.token_hex(4)
    counter = itertools.count(1)
    return lambda: f"{prefix}-{next(counter):x}"


request_id = _request_ids()
"""Creates an id for a request: short, unique in all logs, without information about the request."""


class LogWriter(logging.Handler):
    """Write lines to a descriptor: at once if it takes them, otherwise in a thread that waits for it.

    A full pipe would stop the event loop, and its reader may pause for as long as it likes: a log collector that hangs,
    a terminal in which a user selects text. Lines stay in order. Exception: when two workers that share a pipe both
    find room for the same line, one of them waits until the reader continues.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._thread: threading.Thread | None = None
        self._start_backlog()

    def _start_backlog(self) -> None:
        # Only the thread changes the last two numbers, and only the caller of `emit` the first two. So neither waits
        # for the other, and the end of the program, which holds the handler's lock, does not stop the thread.
        self._waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._accepted_bytes = 0
        self._dropped = 0
        self._written_bytes = 0
        self._reported = 0

    @property
    def is_idle(self) -> bool:
        """No line waits to be written."""
        return self._written_bytes == self._accepted_bytes and self._reported == self._dropped

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)
            return
        if self._thread is not None and not self._thread.is_alive():
            # A forked process has no thread, and its parent writes the backlog.
            self._thread = None
            self._start_backlog()
        if self.is_idle:
            line = self._write_what_fits(line)
        if line:
            self._write_later(line)

    def flush(self) -> None:
        """Wait up to a second until the reader has taken the backlog. Logging calls this when the program ends."""
        deadline = time.monotonic() + _LAST_LINES_S
        while not self.is_idle and self._thread is not None and self._thread.is_alive():
            if time.monotonic() > deadline:
                return
            time.sleep(_FLUSH_POLL_S)

    def _write_what_fits(self, data: bytes) -> bytes:
        """Write as much as the descriptor takes without blocking, and return the rest."""
        try:
            while data and select.select((), (self._descriptor,), (), 0)[1]:
                data = data[os.write(self._descriptor, data[:_PIECE_BYTES]) :]
        except OSError:
            return b""  # The reader has exited, so nobody can read the line.
        return data

    def _write_later(self, line: bytes) -> None:
        if self._accepted_bytes - self._written_bytes + len(line) > LOG_BACKLOG_BYTES:
            self._dropped += 1
            return
        self._accepted_bytes += len(line)
        self._waiting.put(line)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_backlog, name="log-writer", daemon=True)
            self._thread.start()

    def _write_backlog(self) -> None:
        while True:
            line = self._waiting.get()
            self._write(line)
            self._written_bytes += len(line)
            if (lost := self._dropped - self._reported) and self._waiting.empty():
                record = logging.makeLogRecord({"name": __name__, "levelname": "WARNING", "msg": _LOST % lost})
                self._write(f"{self.format(record)}\n".encode())
                self._reported += lost

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return  # The reader has exited.


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO headwater.http.server message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_moment(record), f"{record.levelname:<5}", record.name, _one_line(record.getMessage())]
        parts += [f"{key}={_one_line(_text(value))}" for key, value in _extras(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class JsonLines(logging.Formatter):
    """One JSON object per line; fields passed as `extra` become separate keys."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in _extras(record).items():
            entry.setdefault(key, value)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=_text)


def _moment(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}


def _text(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _one_line(text: str) -> str:
    """Escape characters that could break the line or forge another one."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
