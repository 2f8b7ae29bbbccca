"""Access control by Host, Origin and the static token, checked when the head of a request is complete."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from typing import Final

from headwater.core.errors import Refusal
from headwater.core.http_errors import HostNotAllowed, OriginNotAllowed, Unauthorized
from headwater.http.origins import Hosts, Origins, is_same_origin

KNOWN_HOSTS_MAX: Final = 1024
"""Host headers that are kept because they are known to be allowed."""
_CHANGING: Final = frozenset((b"PUT", b"POST", b"DELETE", b"PATCH"))
_OPEN_PATHS: Final = (b"/healthz", b"/readyz", b"/ui")
"""Health checks, and the files of the stream browser, to which `/` redirects; its requests for data need the token."""
_WORKER_ACTION: Final = re.compile(rb"/v1/stream/__ds/subscriptions/[^/]+/(?:ack|release|callback)")
"""Requests with the token of a wake, which is checked with the wake. The whole path must match: a subscription or a
linked stream may have the name of an action too."""


class AccessControl:
    def __init__(self, hosts: Hosts, origins: Origins, token: str) -> None:
        self._hosts = hosts
        self.origins = origins
        self._token = token.encode()
        self._known_hosts: set[bytes] = set()
        """Host headers that are already known to be allowed: clients send the same one with every request."""

    def refusal(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Why a request is refused; None if it is allowed."""
        host = headers.get(b"host", b"")
        if host not in self._known_hosts and not self._knows(host):
            return HostNotAllowed(
                f"Host {host.decode('latin-1')!r} is not a name of this server. Add it to server.allowed_hosts."
            )
        origin = headers.get(b"origin")
        if (
            origin is not None
            and method in _CHANGING
            and not is_same_origin(origin, host)
            and not self.origins.allows(origin)
        ):
            return OriginNotAllowed(
                f"Pages of {origin.decode('latin-1')!r} may not send changes. Add it to http.cors_origins."
            )
        if self._token and method != b"OPTIONS" and not self._is_open(target):
            return self._check_token(headers.get(b"authorization", b""))
        return None

    def _knows(self, host: bytes) -> bool:
        """Whether a Host header is allowed; HTTP/1.0 has none."""
        if host and not self._hosts.allows(host):
            return False
        if len(self._known_hosts) >= KNOWN_HOSTS_MAX:
            self._known_hosts.clear()
        self._known_hosts.add(host)
        return True

    def _check_token(self, authorization: bytes) -> Refusal | None:
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token):
            return None
        return Unauthorized(
            "The server requires its token (auth.token); send it as Authorization: Bearer TOKEN.",
            (("WWW-Authenticate", "Bearer"),),
        )

    def _is_open(self, target: bytes) -> bool:
        path = target.partition(b"?")[0]
        if path == b"/" or _WORKER_ACTION.fullmatch(path) is not None:
            return True
        return any(path == open_path or path.startswith(open_path + b"/") for open_path in _OPEN_PATHS)
