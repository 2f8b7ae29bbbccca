"""Where the parts of the stack reach the server: its scheme, a name that its certificate is valid for, whom to trust.

Invariant: with direct TLS, an address that a client could not verify stops the start, with what to set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwater.config import Settings

_ANY_OR_LOOPBACK: Final = frozenset(("0.0.0.0", "::", "127.0.0.1", "::1", "localhost"))


class UnsafeSettings(Exception):
    """Settings with which the stack would not keep what it promises."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The server, or what stands for all its shards, without authentication."""

    url: str
    ca_file: Path | None = None
    """Certificates to trust it by, instead of the system's."""

    @property
    def environment(self) -> dict[str, str]:
        """For a part that talks to it."""
        trust = {} if self.ca_file is None else {"DS_CA_FILE": str(self.ca_file)}
        return {"DS_SERVER_URL": self.url, **trust}


def reachable(host: str) -> str:
    """The address at which this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]", "localhost": "127.0.0.1"}.get(host, host)


def server_address(settings: Settings, host: str, port: int, *, tls: bool, is_shard: bool = False) -> ServerAddress:
    """Derived from where it listens and from its certificate, unless `stack.server_url` says it. A shard is reached
    only by itself."""
    chosen = "" if is_shard else settings.stack.server_url.rstrip("/")
    if not tls:
        return ServerAddress(chosen or f"http://{reachable(host)}:{port}")
    assert settings.tls.cert_path is not None
    certificate = _Certificate(settings.tls.cert_path.absolute())
    trusted = settings.stack.server_ca_path
    if trusted is not None:
        trusted = trusted.absolute()
        if not trusted.is_file():
            raise UnsafeSettings(f"stack.server_ca_path: there is no file {trusted}")
    elif certificate.is_self_signed:
        trusted = certificate.path
    if chosen:
        return ServerAddress(chosen, trusted)
    names = ("127.0.0.1", "::1", "localhost") if host in _ANY_OR_LOOPBACK else (host,)
    name = next((name for name in names if name in certificate.names), None)
    if name is None:
        valid = ", ".join(sorted(certificate.names)) or "no name"
        raise UnsafeSettings(
            f"{certificate.path} (tls.cert_path) is valid for {valid}, not for"
            f" {' or '.join(names)}, where the parts of the stack reach the server: set stack.server_url to an"
            " address with one of its names that leads to this machine"
        )
    return ServerAddress(f"https://{f'[{name}]' if ':' in name else name}:{port}", trusted)


class _Certificate:
    def __init__(self, path: Path) -> None:
        from cryptography import x509  # noqa: PLC0415

        self.path = path
        try:
            found = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UnsafeSettings(f"tls.cert_path: {path} cannot be read as a certificate: {error}") from None
        self.is_self_signed = found.issuer == found.subject
        try:
            valid = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            self.names: frozenset[str] = frozenset()
            return
        addresses = (str(address) for address in valid.get_values_for_type(x509.IPAddress))
        self.names = frozenset((*valid.get_values_for_type(x509.DNSName), *addresses))
