"""A temporary key and certificate for localhost, created for one test run."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Certificate:
    cert_path: Path
    key_path: Path

    def client_context(self) -> ssl.SSLContext:
        """Return an SSL context that trusts only this certificate."""
        return ssl.create_default_context(cafile=str(self.cert_path))


def make_certificate(directory: Path, *, name: str = "server", issuer: Certificate | None = None) -> Certificate:
    """A certificate that signs itself, or one that the issuer has signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost" if issuer is None else name)])
    issuer_name, issuer_key = subject, key
    if issuer is not None:
        issuer_name = x509.load_pem_x509_certificate(issuer.cert_path.read_bytes()).subject
        loaded = serialization.load_pem_private_key(issuer.key_path.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        issuer_key = loaded
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    made = Certificate(directory / f"{name}.crt", directory / f"{name}.key")
    made.cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made
