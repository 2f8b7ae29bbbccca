"""Hosts and origins: the allowed Host names, and the web pages that may call this server.

A page of any site that a developer visits can send requests to a server on the developer's machine. Without a setting,
only pages of the server itself and pages on loopback addresses may send changes or read responses.
"""

from __future__ import annotations

import re
from typing import Final

ANY: Final = "*"
PROXIED: Final = "proxied"
_LOOPBACK_NAME: Final = re.compile(rb"localhost|[a-z0-9-]+\.localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\]")
_AUTHORITY: Final = re.compile(rb"(\[[0-9a-f:.]+\]|[^:/?#@\s]+)(?::(\d{1,5}))?", re.IGNORECASE)
_DEFAULT_PORTS: Final = {b"http": b"80", b"https": b"443"}
_DEFAULT_PORT_NUMBERS: Final = frozenset(map(int, _DEFAULT_PORTS.values()))


def host_name(authority: bytes) -> bytes | None:
    """The name in a Host header or an origin, lower case and without its port; None if it is malformed."""
    found = _AUTHORITY.fullmatch(authority)
    return found[1].lower() if found is not None else None


def is_loopback(name: bytes) -> bool:
    return _LOOPBACK_NAME.fullmatch(name) is not None


class Hosts:
    """The allowed Host names: a foreign name that resolves to this server is refused (DNS rebinding).

    `proxied` allows any name with another port than the server's own. A proxy that checks tokens passes such names on;
    a page of a foreign name that reaches the server without the proxy has to use the port of the server.
    """

    def __init__(self, names: tuple[str, ...], *, listens_on_loopback: bool, port: int) -> None:
        self._any = ANY in names or (not names and not listens_on_loopback)
        self._names = frozenset(name.lower().encode("latin-1") for name in names if name != PROXIED)
        self._is_proxied = PROXIED in names
        self._own_ports = frozenset((b"%d" % port, None) if port in _DEFAULT_PORT_NUMBERS else (b"%d" % port,))

    def allows(self, host: bytes) -> bool:
        if self._any:
            return True
        found = _AUTHORITY.fullmatch(host)
        if found is None:
            return False
        name = found[1].lower()
        if is_loopback(name) or name in self._names:
            return True
        return self._is_proxied and found[2] not in self._own_ports


class Origins:
    """The web pages that may read responses and send changes."""

    def __init__(self, origins: tuple[str, ...], *, allow_loopback: bool) -> None:
        self.any = ANY in origins
        self._listed = frozenset(origin.encode("latin-1") for origin in origins)
        self._allow_loopback = allow_loopback

    def allows(self, origin: bytes) -> bool:
        """Whether pages of this origin may read responses and send changes."""
        if self.any or origin in self._listed:
            return True
        if not self._allow_loopback:
            return False
        scheme, _, authority = origin.partition(b"://")
        name = host_name(authority) if scheme.lower() in _DEFAULT_PORTS else None
        return name is not None and is_loopback(name)


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Whether a page was served by this server. A proxy may terminate TLS, so the scheme may differ from ours."""
    scheme, _, authority = origin.lower().partition(b"://")
    default = _DEFAULT_PORTS.get(scheme)
    if default is None:
        return False
    suffix = b":" + default
    return authority.removesuffix(suffix) == host.lower().removesuffix(suffix)
