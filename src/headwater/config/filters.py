"""The log filter language: `info`, or `warn,headwater.http=debug`. Parsing only; `telemetry` applies it.

Invariant: a `LogFilter` holds only levels that the `logging` module knows, so applying one cannot fail.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

OFF = logging.CRITICAL + 10
TRACE = logging.DEBUG - 5

LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": OFF,
}

OURS = "headwater"
_REFERENCE = re.compile(r"durable_streams(_server)?(\..*)?")
"""The reference server's modules. They do not correspond to ours, so each one selects all of ours."""

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class LogFilter:
    """A default level, and levels for individual loggers (and those below them)."""

    default: int
    modules: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> LogFilter:
        """Parse a comma-separated list of `level`, `module=level` and bare names of our modules, which mean `trace`.

        For other modules only `module=level` is accepted: a bare name is more likely a misspelt level.
        """
        default = logging.INFO
        modules: list[tuple[str, int]] = []
        for part in (piece.strip() for piece in text.split(",")):
            name, equals, level_name = part.partition("=")
            if not equals and part.lower() in LEVELS:
                default = LEVELS[part.lower()]
                continue
            # In Rust, which the variable is named after, `a.b` is written `a::b`.
            module = name.strip().replace("::", ".")
            level = LEVELS.get(level_name.strip().lower()) if equals else TRACE
            if _REFERENCE.fullmatch(module):
                module = OURS
            is_ours = module == OURS or module.startswith(f"{OURS}.")
            if level is None or not _MODULE.fullmatch(module) or not (equals or is_ours):
                raise ValueError(f"{part!r} is neither a level nor module=level; levels are {', '.join(LEVELS)}")
            modules.append((module, level))
        return cls(default, tuple(modules))
