"""The exception for invalid settings: one line with the key, its origin, the value and the accepted values."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

SECRETS: Final = frozenset(("auth.token", "stack.postgres_password", "cluster.postgres_url", "cluster.secret"))
"""Settings whose values are not printed."""


class ConfigError(Exception):
    """The settings are invalid. `str()` is the line to print."""


def unknown(what: str, name: str, origin: str, known: Iterable[str]) -> ConfigError:
    """The error for an unknown name, with the closest known one."""
    candidates = sorted(known)
    near = get_close_matches(name, candidates, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(candidates)}"
    return ConfigError(f"{name}: no such {what} (in {origin}); {hint}")


def wrong(key: str, value: object, origin: str, takes: str, reason: str | None = None) -> ConfigError:
    """The error for a value that its key does not accept."""
    because = f" ({reason})" if reason else ""
    got = f"{len(str(value))} characters" if key in SECRETS else shown(value)
    return ConfigError(f"{key}: got {got} from {origin}; it takes {takes}{because}")


def shown(value: object) -> str:
    """A value in one line, short enough to read."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
