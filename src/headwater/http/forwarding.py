"""Trusted proxies: the client's address, scheme and host from `Forwarded` or `X-Forwarded-*`.

Every proxy adds one element at the right. Elements are used from right to left, as long as the proxy that added them is
trusted: first the peer of the connection, then the address that this peer forwards for. Headers of other peers are
ignored, because any client can send them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

_PAIR: Final = re.compile(r'\s*+([A-Za-z]++)=(?:"((?:[^"\\]|\\.)*+)"|([^\s;,"]*+))\s*+')
_HOST: Final = re.compile(r"[A-Za-z0-9._~-]+(?::\d{1,5})?|\[[0-9A-Fa-f:.]+\](?::\d{1,5})?")
ELEMENTS_MAX: Final = 20
"""More proxies than any deployment has; values further to the left are ignored."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Forwarded(NamedTuple):
    """One hop as described by a proxy; empty strings for unknown values."""

    client: str = ""
    scheme: str = ""
    host: str = ""


class TrustedProxies:
    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = tuple(parse_network(network) for network in networks)
        self._trusts = lru_cache(1024)(self._check)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def trusts(self, address: str) -> bool:
        return self._trusts(address)

    def hop(self, headers: Mapping[bytes, bytes]) -> Forwarded:
        """The hop from the client to the first trusted proxy; the caller has checked that the peer is one."""
        found = Forwarded()
        for element in reversed(_elements(headers)):
            # A value that one proxy omits may have been set by a later one.
            found = Forwarded(*(value or known for value, known in zip(element, found, strict=True)))
            if not element.client or not self.trusts(element.client):
                break
        return found

    def _check(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        return any((mapped or parsed) in network for network in self._networks)


def parse_network(text: str) -> Network:
    """An address or a network such as `10.0.0.0/8`. Raises ValueError."""
    return ipaddress.ip_network(text, strict=False)


def _elements(headers: Mapping[bytes, bytes]) -> list[Forwarded]:
    """The elements of the last proxies, the nearest one last. `Forwarded` (RFC 7239) is preferred."""
    standard = headers.get(b"forwarded")
    if standard is not None:
        return [_standard_element(element) for element in _split(standard.decode("latin-1"))[-ELEMENTS_MAX:]]
    clients = _list(headers, b"x-forwarded-for")
    schemes = _list(headers, b"x-forwarded-proto")
    hosts = _list(headers, b"x-forwarded-host")
    count = max(len(clients), 1) if clients or schemes or hosts else 0
    return [
        Forwarded(_address(_from_right(clients, at)), _scheme(_from_right(schemes, at)), _host(_from_right(hosts, at)))
        for at in range(count, 0, -1)
    ]


def _from_right(values: list[str], at: int) -> str:
    """A value counted from the right. Many proxies replace scheme and host: then the single value is used for all."""
    if not values:
        return ""
    return values[-at] if at <= len(values) else values[0]


def _list(headers: Mapping[bytes, bytes], name: bytes) -> list[str]:
    value = headers.get(name)
    return [part.strip() for part in value.decode("latin-1").split(",")[-ELEMENTS_MAX:]] if value else []


def _split(text: str) -> list[str]:
    """The elements of a list whose values may be quoted."""
    parts, start, quoted = [], 0, False
    for at, character in enumerate(text):
        if character == '"' and (at == 0 or text[at - 1] != "\\"):
            quoted = not quoted
        elif character == "," and not quoted:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _standard_element(element: str) -> Forwarded:
    pairs: dict[str, str] = {}
    for part in element.split(";"):
        match = _PAIR.fullmatch(part)
        if match is not None:
            value = re.sub(r"\\(.)", r"\1", match[2]) if match[2] is not None else match[3]
            pairs.setdefault(match[1].lower(), value)
    return Forwarded(_address(pairs.get("for", "")), _scheme(pairs.get("proto", "")), _host(pairs.get("host", "")))


def _address(text: str) -> str:
    """An address without its port and brackets; names such as `unknown` and `_hidden` are empty."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def _scheme(text: str) -> str:
    return text.lower() if text.lower() in ("http", "https") else ""


def _host(text: str) -> str:
    return text if _HOST.fullmatch(text) else ""
