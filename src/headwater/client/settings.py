"""Settings of a client: headers, tokens, timeouts, retries, certificates."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from headwater.client.effects import HttpRequest, Policy
from headwater.client.errors import InvalidRequestError
from headwater.client.retry import DEFAULT_RETRY, Retry

HeaderValue = str | Callable[[], str] | Callable[[], Awaitable[str]]
Token = str | Callable[[], str] | Callable[[], Awaitable[str]] | None

USER_AGENT = "headwater-client"


class ClientOptions(TypedDict, total=False):
    """The options of a client, as keyword arguments, described in `ClientSettings`."""

    token: Token
    headers: Mapping[str, HeaderValue]
    timeout_s: float
    connect_timeout_s: float
    ca_file: str | Path | None
    retry: Retry
    policy: Policy


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Callables are called before each request; those that return awaitables work only in the asynchronous client."""

    token: Token = field(default=None, repr=False)
    """Sent as `Authorization: Bearer …`."""
    headers: Mapping[str, HeaderValue] = field(default_factory=dict)
    """Sent with every request."""
    timeout_s: float = 30.0
    """How long to wait for data within a request."""
    connect_timeout_s: float = 10.0
    ca_file: str | Path | None = None
    """PEM file of CA certificates to trust instead of the system's."""
    retry: Retry = DEFAULT_RETRY
    """How long and how often failing requests are retried."""
    policy: Policy | None = None
    """The complete retry behaviour, instead of `retry`."""

    def tls(self) -> ssl.SSLContext | None:
        """A context for `ca_file`; None uses the transport's default."""
        if self.ca_file is None:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequestError(f"{self.ca_file} cannot be read as PEM certificates: {error}") from None


class RequestHeaders:
    """The headers of each request: fixed ones, those of the request, and those that callables return."""

    __slots__ = ("_callables", "_fixed")

    def __init__(self, settings: ClientSettings) -> None:
        self._fixed = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
        self._callables: list[tuple[str, str, Callable[[], str | Awaitable[str]]]] = []
        for name, value in settings.headers.items():
            self._add(name, "", value)
        if settings.token:
            self._add("Authorization", "Bearer ", settings.token)

    def _add(self, name: str, before: str, value: HeaderValue) -> None:
        if isinstance(value, str):
            self._fixed[name] = before + value
        else:
            self._callables.append((name, before, value))

    def of(self, request: HttpRequest) -> dict[str, str]:
        headers = {**self._fixed, **request.headers}
        for name, before, called in self._callables:
            value = called()
            if not isinstance(value, str):
                raise InvalidRequestError(f"header {name!r}: the callable must return text, not {type(value).__name__}")
            headers[name] = before + value
        return headers

    async def async_of(self, request: HttpRequest) -> dict[str, str]:
        headers = {**self._fixed, **request.headers}
        for name, before, called in self._callables:
            value = called()
            headers[name] = before + (value if isinstance(value, str) else await value)
        return headers
