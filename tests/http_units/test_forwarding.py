"""Which forwarding headers are trusted, and how they are parsed."""

from __future__ import annotations

import pytest

from headwater.http import forwarding
from headwater.http.forwarding import Forwarded, TrustedProxies

PROXIES = TrustedProxies(("10.0.0.0/8", "::1", "192.0.2.7"))


def hop(**headers: str) -> Forwarded:
    return PROXIES.hop({name.replace("_", "-").encode(): value.encode() for name, value in headers.items()})


@pytest.mark.parametrize(
    ("address", "is_trusted"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("::1", True),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
        ("fe80::1%eth0", False),
        ("", False),
        ("localhost", False),
    ],
)
def test_only_configured_addresses_are_trusted(address: str, is_trusted: bool) -> None:
    assert PROXIES.trusts(address) is is_trusted


def test_without_headers_nothing_is_known() -> None:
    assert hop() == Forwarded()


def test_client_is_the_last_untrusted_address() -> None:
    assert hop(x_forwarded_for="203.0.113.9").client == "203.0.113.9"
    assert hop(x_forwarded_for="203.0.113.9, 10.0.0.1, 10.0.0.2").client == "203.0.113.9"
    forged = hop(x_forwarded_for="10.0.0.99, 203.0.113.9, 10.0.0.1")
    assert forged.client == "203.0.113.9", "a value from an untrusted client is ignored"


def test_scheme_and_host_of_the_same_hop() -> None:
    found = hop(x_forwarded_for="203.0.113.9", x_forwarded_proto="https", x_forwarded_host="streams.example.com:8443")
    assert found == Forwarded("203.0.113.9", "https", "streams.example.com:8443")
    chain = hop(x_forwarded_for="203.0.113.9, 10.0.0.1", x_forwarded_proto="https, http")
    assert chain.scheme == "https"
    assert hop(x_forwarded_proto="https").scheme == "https"


def test_forwarded_is_preferred_and_may_be_quoted() -> None:
    found = hop(
        forwarded='for="[2001:db8::17]:4711";proto=HTTPS;host="a.example.com", for=10.0.0.1;proto=http',
        x_forwarded_for="1.2.3.4",
    )
    assert found == Forwarded("2001:db8::17", "https", "a.example.com")
    assert hop(forwarded="for=203.0.113.5;by=10.0.0.1").client == "203.0.113.5"


@pytest.mark.parametrize("value", ["for=unknown", "for=_hidden", 'for="', ";;;", "proto=gopher", 'host="a b"', ","])
def test_malformed_forwarding_headers_are_ignored(value: str) -> None:
    assert hop(forwarded=value) == Forwarded()


@pytest.mark.parametrize("name", [b"x-forwarded-for", b"forwarded"])
def test_only_the_last_elements_are_parsed(name: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client can send thousands through a proxy, and each would be parsed on the event loop."""
    parsed = []
    parse = forwarding._address

    def counting(text: str) -> str:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(forwarding, "_address", counting)
    element = b"for=192.0.2.9" if name == b"forwarded" else b"192.0.2.9"
    assert TrustedProxies(["10.0.0.0/8"]).hop({name: b",".join([element] * 2_000)}).client == "192.0.2.9"
    assert len(parsed) <= forwarding.ELEMENTS_MAX


def test_hosts_with_other_characters_are_ignored() -> None:
    for host in ("evil.com/path", "a@b", "a b", "x" * 10 + "\r\nX: y"):
        assert hop(x_forwarded_host=host).host == ""
