"""TLS between nodes: each side presents a certificate that the authority of the cluster has signed.

Names in certificates are not compared: a node is identified by the secret of the cluster. The proof of the secret
includes the certificates of both sides, so another holder of a certificate cannot relay it. The files are read for each
connection, so renewed ones are used without a restart.
"""

from __future__ import annotations

import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwater.config.cluster import ClusterSettings
from headwater.storage.interface import StorageError

_END: Final = "-----END CERTIFICATE-----"
_NO_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE"))
"""What OpenSSL calls bytes that are not TLS."""


@dataclass(frozen=True, slots=True)
class LinkTls:
    """The files of one node."""

    cert_path: Path
    key_path: Path
    ca_path: Path

    def check(self) -> None:
        """Raise `StorageError` if the files cannot be used."""
        try:
            self.context(accepts=True)
            self.fingerprint()
        except (OSError, ValueError) as error:
            reason = (error.reason or error) if isinstance(error, ssl.SSLError) else error
            raise StorageError(
                "cluster.tls_cert_path, cluster.tls_key_path and cluster.tls_ca_path must be the PEM files of a"
                f" certificate, its key and the authority that signed it: {reason}."
            ) from None

    def context(self, *, accepts: bool) -> ssl.SSLContext:
        """The TLS context of one connection; `accepts` is true on the accepting side."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.cert_path, self.key_path)
        context.load_verify_locations(self.ca_path)
        return context

    def fingerprint(self) -> bytes:
        """The digest of this node's certificate."""
        first, end, _ = self.cert_path.read_text().partition(_END)
        return fingerprint_of(ssl.PEM_cert_to_DER_cert(first[first.find("-----BEGIN") :] + end))


def link_tls(settings: ClusterSettings) -> LinkTls | None:
    """The configured TLS; None if the nodes connect without it."""
    cert_path, key_path, ca_path = settings.tls_cert_path, settings.tls_key_path, settings.tls_ca_path
    if cert_path is None or key_path is None or ca_path is None:
        return None
    return LinkTls(cert_path, key_path, ca_path)


def fingerprint_of(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def explained(error: ssl.SSLError) -> str:
    """Why a connection failed, for the log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate was not signed by the authority of cluster.tls_ca_path ({error.verify_message})."
            " Give all nodes certificates of one authority"
        )
    reason = str(error.reason or error)
    if reason in _NO_TLS:
        return "it does not use TLS. Set cluster.tls_cert_path, tls_key_path and tls_ca_path on every node"
    if "ALERT" in reason:
        return f"it refused the certificate of this node ({reason}). Give all nodes certificates of one authority"
    return f"TLS failed: {reason}"
