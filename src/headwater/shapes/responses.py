"""The headers of the Shape API: those that the client requires, and caching.

Invariant: every response that names a handle differs from every other in its URL or its ETag.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from typing import Final

import msgspec

from headwater.shapes.errors import InvalidShapeError, ShapeError, UnavailableError
from headwater.shapes.messages import MUST_REFETCH

Headers = list[tuple[str, str]]

_CURSOR_EPOCH_S: Final = 1_728_432_000
"""9 October 2024, the epoch of Electric's cursors."""
EXPOSED: Final = (
    "electric-cursor, electric-handle, electric-has-data, electric-offset, electric-schema, electric-snapshot,"
    " electric-up-to-date, etag, retry-after"
)
JSON: Final = ("content-type", "application/json; charset=utf-8")
_NO_STORE: Final[Headers] = [("cache-control", "no-store"), ("surrogate-control", "no-store")]


@dataclass(frozen=True, slots=True)
class ShapeResponse:
    status: int
    headers: Headers = field(default_factory=list)
    body: bytes = b""


def from_start() -> tuple[str, str]:
    """Caching of the first chunk: browsers keep it, shared caches check for a newer shape every hour."""
    return ("cache-control", "public, max-age=604800, s-maxage=3600, stale-while-revalidate=2629746")


def catch_up() -> tuple[str, str]:
    return ("cache-control", "public, max-age=60, stale-while-revalidate=300")


def long_poll() -> tuple[str, str]:
    return ("cache-control", "public, max-age=5, stale-while-revalidate=5")


def sse(duration_s: float) -> tuple[str, str]:
    return ("cache-control", f"public, max-age={max(1, int(duration_s) - 1)}")


def next_cursor(given: str | None, interval_s: float) -> str:
    """A cursor that is the same for all clients within one interval, and differs from the client's last one."""
    passed = time.time() - _CURSOR_EPOCH_S
    cursor = math.ceil(passed / interval_s) * max(1, round(interval_s))
    if given == str(cursor):
        cursor += random.randint(1, 3600)
    return str(cursor)


def must_refetch(handle: str | None) -> ShapeResponse:
    age = 60 if handle is not None else 1
    headers = [JSON, ("cache-control", f"public, max-age={age}, must-revalidate")]
    if handle is not None:
        headers.append(("electric-handle", handle))
    return ShapeResponse(409, headers, MUST_REFETCH)


def refusal(
    status: int, message: str, errors: dict[str, list[str]] | None = None, retry_after_s: int = 0
) -> ShapeResponse:
    """An error in Electric's format, which must not be cached."""
    body: dict[str, object] = {"message": message}
    if errors is not None:
        body["errors"] = errors
    headers = [JSON, *_NO_STORE]
    if retry_after_s:
        headers.append(("retry-after", str(retry_after_s)))
    return ShapeResponse(status, headers, msgspec.json.encode(body))


def failure(error: ShapeError) -> ShapeResponse:
    if isinstance(error, InvalidShapeError):
        return refusal(400, "Invalid request", {error.parameter: [error.reason]})
    if isinstance(error, UnavailableError):
        return refusal(503, str(error), retry_after_s=error.retry_after_s)
    return must_refetch(None)
