"""Logging: one handler on stderr, text or JSON lines, UTC times, levels by filter; and request ids.

Invariant: one record is one line (in text style a traceback follows), even if it contains names chosen by clients.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from headwater.config import LogFilter
from headwater.config.filters import OFF, TRACE

# Libraries that log every request at info. They are shown only if the filter names them.
_CHATTY = ("httpx", "httpcore", "asyncio")

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def set_up_logging(log_filter: LogFilter, style: str) -> None:
    """Send every logger to stderr in the given style (`text` or `json`), at the filter's levels."""
    logging.addLevelName(TRACE, "TRACE")
    logging.addLevelName(OFF, "OFF")
    # Do not print a traceback for each line after the reader of stderr has exited.
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
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
