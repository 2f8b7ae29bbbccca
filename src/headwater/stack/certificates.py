"""A certificate for trying HTTPS: self-signed, for this machine, kept in the data directory and renewed in time.

Browsers warn about it once. A deployment sets `proxy.tls_cert_path` and `proxy.tls_key_path` instead.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headwater.stack.keys import replace_file

LIFETIME: Final = timedelta(days=90)
RENEW_BEFORE: Final = timedelta(days=7)


class CertificateFiles(NamedTuple):
    certificate: Path
    key: Path


def trial_certificate(directory: Path, now: datetime | None = None) -> CertificateFiles:
    """The certificate in a directory; made or renewed if it is missing or expires soon."""
    now = now if now is not None else datetime.now(UTC)
    files = CertificateFiles(directory / "trial.crt", directory / "trial.key")
    if not files.key.exists() or _expires_soon(files.certificate, now):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make(files, now)
    return files


def _expires_soon(path: Path, now: datetime) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return True
    return certificate.not_valid_after_utc - now < RENEW_BEFORE


def _make(files: CertificateFiles, now: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Headwater trial certificate")])
    names: list[x509.GeneralName] = [x509.DNSName(host) for host in sorted({"localhost", *_host_names()})]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    replace_file(files.key, pem, 0o600)
    replace_file(files.certificate, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _host_names() -> set[str]:
    """Names of this machine that a certificate can have."""
    try:
        found = socket.gethostname().encode("idna").decode("ascii").lower()
    except UnicodeError:
        return set()
    return {found} if found and len(found) <= 63 else set()
