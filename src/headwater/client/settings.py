"""How a client connects: headers, tokens, timeouts, certificates."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headwater.client.effects import Policy
from headwater.client.errors import InvalidRequestError

HeaderValue = str | Callable[[], str] | Callable[[], Awaitable[str]]
Token = str | Callable[[], str] | Callable[[], Awaitable[str]] | None

USER_AGENT = "headwater-client"


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of a client. Callables are called before each request; awaitables work in the asynchronous client."""

    headers: Mapping[str, HeaderValue] = field(default_factory=dict)
    token: Token = field(default=None, repr=False)
    """Sent as `Authorization: Bearer …`."""
    timeout_s: float = 30.0
    """How long a server may be silent within a request."""
    connect_timeout_s: float = 10.0
    ca_file: str | Path | None = None
    """PEM certificates to trust instead of those of the system."""
    policy: Policy = field(default_factory=Policy)

    def tls(self) -> ssl.SSLContext | None:
        """A context for `ca_file`; None leaves it to the transport."""
        if self.ca_file is None:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequestError(f"{self.ca_file} cannot be read as PEM certificates: {error}") from None

    def fixed_headers(self) -> dict[str, str]:
        """The headers that are the same on every request."""
        found = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
        found |= {name: value for name, value in self.headers.items() if isinstance(value, str)}
        if isinstance(self.token, str) and self.token:
            found["Authorization"] = f"Bearer {self.token}"
        return found

    def header_callables(self) -> dict[str, tuple[Callable[[], str | Awaitable[str]], str]]:
        """The headers that are computed for each request: name to callable and what precedes its result."""
        found: dict[str, tuple[Callable[[], str | Awaitable[str]], str]] = {
            name: (value, "") for name, value in self.headers.items() if not isinstance(value, str)
        }
        if self.token is not None and not isinstance(self.token, str):
            found["Authorization"] = (self.token, "Bearer ")
        return found
