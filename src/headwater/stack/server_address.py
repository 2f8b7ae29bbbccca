"""The server address that other services of the stack use, and the certificates that they trust.

Invariant: with TLS, startup fails if the certificate is not valid for that address; the message names the setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwater.config import Settings

_ANY_OR_LOOPBACK: Final = frozenset(("0.0.0.0", "::", "127.0.0.1", "::1", "localhost"))


class StackSettingsError(Exception):
    """The settings do not allow a working stack; the message names the setting to change."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """An address of the server that needs no token."""

    url: str
    ca_file: Path | None = None
    """Trusted certificates, instead of the system's."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a service that uses the server."""
        trust = {} if self.ca_file is None else {"DS_CA_FILE": str(self.ca_file)}
        return {"DS_SERVER_URL": self.url, **trust}


def reachable(host: str) -> str:
    """Return the address to connect to for a service that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]", "localhost": "127.0.0.1"}.get(host, host)


def server_address(settings: Settings) -> ServerAddress:
    """Derive the address from the listening address and the certificate. `stack.server_url` overrides it."""
    host, port = settings.server.host, settings.server.port
    chosen = settings.stack.server_url.rstrip("/")
    if not settings.tls.enabled:
        return ServerAddress(chosen or f"http://{reachable(host)}:{port}")
    assert settings.tls.cert_path is not None
    certificate = _Certificate(settings.tls.cert_path.absolute())
    trusted = settings.stack.server_ca_path
    if trusted is not None:
        trusted = trusted.absolute()
        if not trusted.is_file():
            raise StackSettingsError(f"stack.server_ca_path: the file {trusted} does not exist")
    elif certificate.is_self_signed:
        trusted = certificate.path
    if chosen:
        return ServerAddress(chosen, trusted)
    names = ("127.0.0.1", "::1", "localhost") if host in _ANY_OR_LOOPBACK else (host,)
    name = next((name for name in names if name in certificate.names), None)
    if name is None:
        valid = ", ".join(sorted(certificate.names)) or "no names"
        raise StackSettingsError(
            f"{certificate.path} (tls.cert_path) is valid for {valid}, but the other services connect to"
            f" {' or '.join(names)}. Set stack.server_url to a URL of this server with a name that the certificate"
            " is valid for."
        )
    return ServerAddress(f"https://{f'[{name}]' if ':' in name else name}:{port}", trusted)


class _Certificate:
    def __init__(self, path: Path) -> None:
        from cryptography import x509  # noqa: PLC0415

        self.path = path
        try:
            found = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError) as error:
            raise StackSettingsError(f"tls.cert_path: {path} cannot be read as a certificate: {error}") from None
        self.is_self_signed = found.issuer == found.subject
        try:
            valid = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            self.names: frozenset[str] = frozenset()
            return
        addresses = (str(address) for address in valid.get_values_for_type(x509.IPAddress))
        self.names = frozenset((*valid.get_values_for_type(x509.DNSName), *addresses))
