"""Which addresses a webhook may call: nothing that only this machine or its network can reach.

Whoever may create a subscription makes the server send requests, so its view of the network must not be theirs. A URL
is judged by how it is written when it is given, and the address that its host resolves to is judged at every call,
right before the connection to exactly that address (`engine.webhooks`). https only; for development, http to
`localhost` and 127.0.0.0/8 can be allowed.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from headwater.core.errors import WebhookUrlRejected

Address: TypeAlias = IPv4Address | IPv6Address

LOCALHOST: Final = "localhost"

_HOST: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.ASCII)
HOST_MAX_CHARS: Final = 253
LABEL_MAX_CHARS: Final = 63
"""DNS allows no longer host names and labels, and resolvers raise instead of answering (RFC 1035 §2.3.4)."""
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
"""A last label like this makes resolvers read the host as an IPv4 address in one of its old spellings."""

_LOOPBACK: Final = IPv4Network("127.0.0.0/8")
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
_REFUSED_V4: Final = (
    IPv4Network("192.0.0.0/24"),  # Not global; older versions of `ipaddress` do not know, and a cloud uses it.
    IPv4Network("192.88.99.0/24"),  # Relays to 6to4, which lead anywhere.
    IPv4Network("168.63.129.16/32"),  # A cloud's metadata service on an address that looks public.
)
_REFUSED_V6: Final = (
    IPv6Network("2002::/16"),  # 6to4 and Teredo carry an IPv4 address that relays would call.
    IPv6Network("2001::/32"),
)


@dataclass(frozen=True, slots=True)
class WebhookUrl:
    """A URL that is allowed as far as its spelling tells."""

    scheme: str
    host: str
    port: int
    target: str
    is_local: bool

    @property
    def authority(self) -> str:
        """The Host header: what the URL says, without a port that goes without saying."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _default_port(self.scheme) else f"{host}:{self.port}"


def parse_webhook_url(text: str, *, allow_local: bool) -> WebhookUrl:
    """The parts of a webhook's URL, or a refusal that says what is wrong with it."""
    if not text.isascii() or any(ord(character) <= 0x20 or character in '\\"<>^`{|}\x7f' for character in text):
        raise WebhookUrlRejected("webhook.url must be a plain ASCII URL; write other characters percent-encoded.")
    try:
        url = urlsplit(text)
        port = url.port
        host = url.hostname or ""
    except ValueError:
        raise WebhookUrlRejected("webhook.url is not a valid URL.") from None
    scheme = url.scheme.lower()
    if scheme not in ("http", "https") or not host:
        raise WebhookUrlRejected("webhook.url must be an absolute https URL.")
    if "@" in url.netloc:
        raise WebhookUrlRejected("webhook.url may not carry a user name or password.")
    if port == 0:
        raise WebhookUrlRejected("webhook.url has no valid port.")
    host = host.removesuffix(".")
    address = _literal(host)
    is_local = host == LOCALHOST or (isinstance(address, IPv4Address) and address in _LOOPBACK)
    if is_local:
        if not allow_local:
            raise WebhookUrlRejected("webhook.url must not lead to this machine.")
        if scheme != "http":
            raise WebhookUrlRejected("On this machine webhooks are plain http, for development.")
    elif scheme != "https":
        raise WebhookUrlRejected("webhook.url must be https.")
    elif address is not None and not is_public(address):
        raise WebhookUrlRejected("webhook.url must not lead into a private network.")
    elif host.endswith(f".{LOCALHOST}"):
        raise WebhookUrlRejected("webhook.url must not lead to this machine.")
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return WebhookUrl(scheme, host, port or _default_port(scheme), target, is_local)


def check_address(url: WebhookUrl, address: Address) -> None:
    """Whether the address that a URL's host resolved to may be called for it."""
    if url.is_local:
        if not _plain(address).is_loopback:
            raise WebhookUrlRejected(f"{url.host} does not resolve to this machine.")
    elif not is_public(address):
        # Which address it was is not said: it would map the network for whoever asks.
        raise WebhookUrlRejected(f"{url.host} resolves into a private network.")


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet, also by what is embedded in it."""
    address = _plain(address)
    if isinstance(address, IPv4Address):
        return (
            address.is_global
            and not (address.is_multicast or address.is_reserved)
            and not any(address in network for network in _REFUSED_V4)
        )
    return address in _GLOBAL_UNICAST and address.is_global and not any(address in network for network in _REFUSED_V6)


def _plain(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, where it does."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _literal(host: str) -> Address | None:
    """The address that a host is, or None when it is a name."""
    try:
        if ":" in host:
            if "%" in host:
                raise WebhookUrlRejected("webhook.url may not name a network interface.")
            return IPv6Address(host)
        return IPv4Address(host)
    except ipaddress.AddressValueError:
        pass
    if _NUMBER.fullmatch(host.rsplit(".", 1)[-1]):
        raise WebhookUrlRejected("An IPv4 address is written as four decimal numbers without leading zeros.")
    if _HOST.fullmatch(host) is None:
        raise WebhookUrlRejected("webhook.url has no valid host.")
    if len(host) > HOST_MAX_CHARS or any(len(label) > LABEL_MAX_CHARS for label in host.split(".")):
        raise WebhookUrlRejected(
            f"The host of webhook.url may have {HOST_MAX_CHARS} characters, and {LABEL_MAX_CHARS} between two dots."
        )
    return None


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80
