"""Which webhook addresses are called: the SSRF table, by spelling and by resolved address."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from headwater.core.addresses import check_address, is_public, parse_webhook_url
from headwater.core.subscription_errors import WebhookUrlRejected

ALLOWED = [
    (f"https://{'a' * 63}.example/", f"{'a' * 63}.example", 443, "/"),
    ("https://hooks.example.com/a?b=c", "hooks.example.com", 443, "/a?b=c"),
    ("https://hooks.example.com:8443", "hooks.example.com", 8443, "/"),
    ("HTTPS://Hooks.Example.COM./x", "hooks.example.com", 443, "/x"),
    ("https://xn--bcher-kva.example/", "xn--bcher-kva.example", 443, "/"),
    ("https://8.8.8.8/", "8.8.8.8", 443, "/"),
    ("https://[2606:4700:4700::1111]:444/", "2606:4700:4700::1111", 444, "/"),
    ("https://my_service.example/", "my_service.example", 443, "/"),
]

REJECTED = [
    "http://10.0.0.1/hook",
    "http://hooks.example.com/",
    "https://10.0.0.1/",
    "https://172.16.0.1/",
    "https://172.31.255.255/",
    "https://192.168.1.1/",
    "https://127.0.0.1/",
    "https://0.0.0.0/",
    "https://169.254.169.254/latest/meta-data/",
    "https://168.63.129.16/",
    "https://100.64.0.1/",
    "https://100.100.100.200/",
    "https://192.0.0.192/",
    "https://192.0.2.1/",
    "https://198.18.0.1/",
    "https://192.88.99.1/",
    "https://224.0.0.1/",
    "https://240.0.0.1/",
    "https://255.255.255.255/",
    # One address in its legacy notations.
    "https://2130706433/",
    "https://0x7f000001/",
    "https://017700000001/",
    "https://127.1/",
    "https://0177.0.0.1/",
    "https://0x7f.0.0.1/",
    "https://127.0.0.0x1/",
    "https://0/",
    "https://10.0.0.1./",
    # IPv6, and IPv4 inside of it.
    "https://[::]/",
    "https://[::1]/",
    "https://[fe80::1]/",
    "https://[fe80::1%25eth0]/",
    "https://[fc00::1]/",
    "https://[fd00:ec2::254]/",
    "https://[fec0::1]/",
    "https://[ff02::1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:10.0.0.1]/",
    "https://[::ffff:a9fe:a9fe]/",
    "https://[::127.0.0.1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[64:ff9b::10.0.0.1]/",
    "https://[64:ff9b:1::1]/",
    "https://[2002:7f00:1::]/",
    "https://[2002:a00:1::1]/",
    "https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/",
    "https://[2001:db8::1]/",
    "https://[100::1]/",
    # This machine, by name.
    "https://localhost/",
    "https://LOCALHOST./",
    "https://app.localhost/",
    # Not plain URLs.
    "ftp://example.com/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:6379/_x",
    "https://",
    "https:///path",
    "//example.com/",
    "example.com",
    "",
    "https://user@example.com/",
    "https://user:secret@example.com/",
    "http://127.0.0.1@8.8.8.8/",
    "https://8.8.8.8\\@10.0.0.1/",
    "https://exa mple.com/",
    "https://example.com/\r\nHost: x",
    "https://example.com:0/",
    "https://example.com:99999/",
    "https://example.com:x/",
    "https://exämple.com/",
    "https://example..com/",
    "https://-example.com/",
    "https://[::1/",
    "https://①②⑦.⓪.⓪.①/",
    f"https://{'a' * 64}.example/",
    f"https://{'a.' * 126}aa/",
]

LOCAL = [
    ("http://localhost:8080/hook", "localhost", 8080),
    ("http://LocalHost./", "localhost", 80),
    ("http://127.0.0.1:9/", "127.0.0.1", 9),
    ("http://127.255.0.7/", "127.255.0.7", 80),
]


@pytest.mark.parametrize(("text", "host", "port", "target"), ALLOWED, ids=[row[0] for row in ALLOWED])
def test_public_https_is_allowed(text: str, host: str, port: int, target: str) -> None:
    for allow_local in (False, True):
        url = parse_webhook_url(text, allow_local=allow_local)
        assert (url.scheme, url.host, url.port, url.target, url.is_local) == ("https", host, port, target, False)


@pytest.mark.parametrize("text", REJECTED)
def test_t35_other_addresses_are_rejected_also_in_development(text: str) -> None:
    for allow_local in (False, True):
        with pytest.raises(WebhookUrlRejected):
            parse_webhook_url(text, allow_local=allow_local)


@pytest.mark.parametrize(("text", "host", "port"), LOCAL, ids=[row[0] for row in LOCAL])
def test_loopback_over_http_is_allowed_by_the_setting(text: str, host: str, port: int) -> None:
    url = parse_webhook_url(text, allow_local=True)
    assert (url.scheme, url.host, url.port, url.is_local) == ("http", host, port, True)
    with pytest.raises(WebhookUrlRejected):
        parse_webhook_url(text, allow_local=False)
    with pytest.raises(WebhookUrlRejected):
        parse_webhook_url(text.replace("http:", "https:"), allow_local=True)


PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
NOT_PUBLIC = [
    *("10.1.2.3", "127.0.0.1", "127.9.9.9", "169.254.169.254", "168.63.129.16", "192.0.0.192", "0.0.0.0", "100.64.1.1"),
    *("::1", "::", "fe80::1", "fd00::1", "::ffff:192.168.0.1", "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:c0a8:1::"),
    *("2001::1", "::10.0.0.1", "ff0e::1", "fec0::1", "255.255.255.255", "224.0.0.251"),
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))
    check_address(parse_webhook_url("https://hooks.example.com/", allow_local=True), ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_t35_a_name_that_resolves_to_a_private_address_is_rejected(address: str) -> None:
    assert not is_public(ip_address(address))
    with pytest.raises(WebhookUrlRejected) as caught:
        check_address(parse_webhook_url("https://hooks.example.com/", allow_local=True), ip_address(address))
    assert address not in caught.value.detail, "the error must not reveal the internal address"


@pytest.mark.parametrize("address", ["10.0.0.1", "8.8.8.8", "169.254.169.254", "fe80::1", "::ffff:10.0.0.1"])
def test_localhost_must_resolve_to_loopback(address: str) -> None:
    url = parse_webhook_url("http://localhost:1/", allow_local=True)
    check_address(url, ip_address("127.0.0.1"))
    check_address(url, ip_address("::1"))
    with pytest.raises(WebhookUrlRejected):
        check_address(url, ip_address(address))


def test_authority_is_taken_from_the_url() -> None:
    assert parse_webhook_url("https://a.example:443/", allow_local=False).authority == "a.example"
    assert parse_webhook_url("https://a.example:444/", allow_local=False).authority == "a.example:444"
    assert parse_webhook_url("https://[2606:4700::1]/", allow_local=False).authority == "[2606:4700::1]"
    assert parse_webhook_url("http://localhost:80/", allow_local=True).authority == "localhost"
