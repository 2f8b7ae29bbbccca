"""The effects that an operation asks its driver to perform. Operations are generators that do no I/O themselves.

An operation yields effects and receives their results: the synchronous driver (`sync_session`) performs them by
blocking, the asynchronous one (`async_session`) by awaiting. So each operation exists once. Errors of an effect are
raised inside the operation, at its `yield`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urljoin

from headwater.client.errors import ClientError, error_of
from headwater.client.http1 import Body, HttpResponse, split_url
from headwater.client.retry import DEFAULT_RETRY, ENDLESS_RETRY, Retry

log = logging.getLogger("headwater.client")

T = TypeVar("T")

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))
_REDIRECTS_MAX: Final = 5


class HttpRequest(NamedTuple):
    """Send a request; the result is the complete `HttpResponse`."""

    method: str
    url: str
    query: str = ""
    headers: Mapping[str, str] = _NO_HEADERS
    body: Body = b""
    timeout_s: float | None = None
    """How long to wait for data; None uses the client's timeout."""

    @property
    def target(self) -> str:
        """The path and query that are sent."""
        target = split_url(self.url)[1]
        if not self.query:
            return target
        return f"{target}{'&' if '?' in target else '?'}{self.query}"


class Open(NamedTuple):
    """Send a request; the result is its `HttpResponse`, as soon as the head has arrived. The driver closes it."""

    request: HttpRequest


class Receive(NamedTuple):
    """The next piece of the body of an opened response; empty at its end."""

    response: HttpResponse


class Sleep(NamedTuple):
    """Wait; the result is None."""

    seconds: float


class Emit(NamedTuple):
    """Pass a value to the caller's iterator; the result is None."""

    value: Any


Effect = HttpRequest | Open | Receive | Sleep | Emit
Operation = Generator[Effect, Any, T]


def _log_retry(error: ClientError, delay_s: float) -> None:
    log.info("%s; next attempt in %.1f s", error, delay_s)


@dataclass(frozen=True, slots=True)
class Policy:
    """The retry policy and timeouts that all operations of a client share."""

    retry: Retry = DEFAULT_RETRY
    follow_retry: Retry = ENDLESS_RETRY
    """For a reader that has caught up once: it resumes when the server is available again."""
    live_timeout_s: float = 90.0
    """Longer than servers keep a live read open (60 s): a connection without data for this long is dead."""
    on_retry: Callable[[ClientError, float], None] = _log_retry
    """Called before each wait, with the error and the delay in seconds."""
    clock: Callable[[], float] = time.monotonic


class Attempts:
    """Counts consecutive failures of one request, and decides what to do after each."""

    __slots__ = ("_failures", "_first_failed_at", "_idempotent", "_policy")

    def __init__(self, policy: Policy, *, idempotent: bool = True) -> None:
        self._policy = policy
        self._idempotent = idempotent
        self._failures = 0
        self._first_failed_at = 0.0

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, error: ClientError) -> Sleep:
        """The wait before the next attempt. Raises `error` if there is no next attempt."""
        policy = self._policy
        now = policy.clock()
        if not self._failures:
            self._first_failed_at = now
        self._failures += 1
        delay_s = policy.retry.delay_s(
            error, failures=self._failures, elapsed_s=now - self._first_failed_at, idempotent=self._idempotent
        )
        if delay_s is None:
            raise error
        policy.on_retry(error, delay_s)
        return Sleep(delay_s)


def send(policy: Policy, request: HttpRequest, *expected: int, idempotent: bool = True) -> Operation[HttpResponse]:
    """Send a request until it gets an expected status. Raises the matching error for any other response."""
    attempts: Attempts | None = None
    redirects = 0
    while True:
        try:
            response: HttpResponse = yield request
            if response.status in expected:
                return response
            if response.status in _REDIRECTS and redirects < _REDIRECTS_MAX:
                redirected = redirect(request, response)
                if redirected is not None:
                    request = redirected
                    redirects += 1
                    continue
            raise error_of(request.method, request.url, response.status, response.headers, response.body)
        except ClientError as error:
            if attempts is None:
                attempts = Attempts(policy, idempotent=idempotent)
            wait = attempts.failed(error)
        yield wait


def redirect(request: HttpRequest, response: HttpResponse) -> HttpRequest | None:
    """The request that a redirect asks for; None if it leads to another origin, which must not get our tokens."""
    location = response.headers.get("location")
    if location is None or (response.status == 303 and request.method not in {"GET", "HEAD"}):
        return None
    url = urljoin(request.url, location)
    if split_url(url)[0] != split_url(request.url)[0]:
        return None
    return request._replace(url=url, query="" if "?" in url else request.query)
