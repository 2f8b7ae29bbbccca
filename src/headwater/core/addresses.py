"""Webhook addresses: which URLs and IP addresses the server may call.

A client that creates a subscription makes the server send requests, and must not reach what only this machine or its
network can reach. The spelling of a URL is checked when the subscription is created. The address that its host resolves
to is checked at every call, right before the connection to exactly that address (`engine.webhooks`). Only https is
allowed; for development, a setting allows http to `localhost` and 127.0.0.0/8.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from headwater.core.subscription_errors import WebhookUrlRejected

Address: TypeAlias = IPv4Address | IPv6Address

LOCALHOST: Final = "localhost"

_HOST: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.ASCII)
HOST_MAX_CHARS: Final = 253
LABEL_MAX_CHARS: Final = 63
"""Limits of DNS (RFC 1035 §2.3.4); resolvers raise an exception for longer host names and labels."""
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
"""Resolvers read a host with a last label like this as an IPv4 address in one of its old spellings."""

_LOOPBACK: Final = IPv4Network("127.0.0.0/8")
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
_REFUSED_V4: Final = (
    IPv4Network(
        "192.0.0.0/24"
    ),  # Not global, which older versions of `ipaddress` do not know; a cloud provider uses it.
    IPv4Network("192.88.99.0/24"),  # Relays to 6to4, which can reach any address.
    IPv4Network("168.63.129.16/32"),  # The metadata service of a cloud provider, on an address that looks public.
)
_REFUSED_V6: Final = (
    IPv6Network("2002::/16"),  # 6to4 and Teredo contain an IPv4 address, which relays would call.
    IPv6Network("2001::/32"),
)


@dataclass(frozen=True, slots=True)
class WebhookUrl:
    """A webhook URL that passed `parse_webhook_url`."""

    scheme: str
    host: str
    port: int
    target: str
    is_local: bool

    @property
    def authority(self) -> str:
        """The Host header: host and port, without the default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _default_port(self.scheme) else f"{host}:{self.port}"


def parse_webhook_url(text: str, *, allow_local: bool) -> WebhookUrl:
    """Parse and check the URL of a webhook."""
    if not text.isascii() or any(ord(character) <= 0x20 or character in '\\"<>^`{|}\x7f' for character in text):
        raise WebhookUrlRejected("webhook.url must be a plain ASCII URL; write other characters percent-encoded.")
    try:
        url = urlsplit(text)
        port = url.port
        host = url.hostname or ""
    except ValueError:
        raise WebhookUrlRejected(
            f"webhook.url {text!r} is not a valid URL; use one such as https://example.com/hook."
        ) from None
    scheme = url.scheme.lower()
    if scheme not in ("http", "https") or not host:
        raise WebhookUrlRejected(
            f"webhook.url must be an absolute https URL such as https://example.com/hook, not {text!r}."
        )
    if "@" in url.netloc:
        raise WebhookUrlRejected(
            "webhook.url may not contain a user name or password; the receiver can check the signature instead."
        )
    if port == 0:
        raise WebhookUrlRejected("webhook.url has port 0; use a port from 1 to 65535.")
    host = host.removesuffix(".")
    address = _literal(host)
    is_local = host == LOCALHOST or (isinstance(address, IPv4Address) and address in _LOOPBACK)
    if is_local:
        if not allow_local:
            raise _names_this_machine(host)
        if scheme != "http":
            raise WebhookUrlRejected(
                f"A webhook to this machine ({host}) must be plain http; use http:// in webhook.url."
            )
    elif scheme != "https":
        raise WebhookUrlRejected(f"webhook.url must be https, not http, because {host} is another machine.")
    elif address is not None and not is_public(address):
        raise WebhookUrlRejected(f"webhook.url names {host}, an address in a private network; use a public address.")
    elif host.endswith(f".{LOCALHOST}"):
        raise _names_this_machine(host)
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return WebhookUrl(scheme, host, port or _default_port(scheme), target, is_local)


def _names_this_machine(host: str) -> WebhookUrlRejected:
    return WebhookUrlRejected(
        f"webhook.url names this machine ({host}); use a public address, or set subscriptions.allow_local_webhooks."
    )


def check_address(url: WebhookUrl, address: Address) -> None:
    """Check the address that the host of a URL resolved to."""
    if url.is_local:
        if not _plain(address).is_loopback:
            raise WebhookUrlRejected(f"{url.host} does not resolve to this machine; use 127.0.0.1 in webhook.url.")
    elif not is_public(address):
        # The message does not contain the address: a client could map the private network with it.
        raise WebhookUrlRejected(
            f"{url.host} resolves to an address in a private network; use a host with a public address."
        )


def is_public(address: Address) -> bool:
    """Whether an address, and any IPv4 address embedded in it, belongs to the public internet."""
    address = _plain(address)
    if isinstance(address, IPv4Address):
        return (
            address.is_global
            and not (address.is_multicast or address.is_reserved)
            and not any(address in network for network in _REFUSED_V4)
        )
    return address in _GLOBAL_UNICAST and address.is_global and not any(address in network for network in _REFUSED_V6)


def _plain(address: Address) -> Address:
    """The IPv4 address that is embedded in an IPv6 address; otherwise the address itself."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _literal(host: str) -> Address | None:
    """The host as an IP address, or None if it is a name."""
    try:
        if ":" in host:
            if "%" in host:
                raise WebhookUrlRejected(
                    f"webhook.url may not name a network interface; remove %{host.partition('%')[2]} from the address."
                )
            return IPv6Address(host)
        return IPv4Address(host)
    except ipaddress.AddressValueError:
        pass
    if _NUMBER.fullmatch(host.rsplit(".", 1)[-1]):
        raise WebhookUrlRejected(
            f"An IPv4 address in webhook.url must be four decimal numbers without leading zeros, not {host!r}."
        )
    if _HOST.fullmatch(host) is None:
        raise WebhookUrlRejected(
            f"{host!r} in webhook.url is not a valid host name; use letters, digits, hyphens and dots."
        )
    if len(host) > HOST_MAX_CHARS or any(len(label) > LABEL_MAX_CHARS for label in host.split(".")):
        raise WebhookUrlRejected(
            f"The host of webhook.url is too long; use at most {HOST_MAX_CHARS} characters, and {LABEL_MAX_CHARS}"
            " between"
            " two dots."
        )
    return None


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80
