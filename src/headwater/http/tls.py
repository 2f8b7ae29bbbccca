"""TLS of the server: certificate, authorities of clients, and refused client certificates.

A client whose certificate is missing or not trusted gets the TLS alert that says so, and the log has a line about it.
The event loop closes the connection as soon as a handshake fails, before the alert is sent; `_CertificateCheck`
therefore reports the failure one step later.
"""

from __future__ import annotations

import logging
import ssl
import time
from typing import Final

from headwater.config import Settings

log = logging.getLogger("headwater.server")

CERTIFICATE_REASONS: Final = {"PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED"}
LOG_EVERY_S: Final = 60.0


def build_tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls.cert_path is None or settings.tls.key_path is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    if settings.tls.client_ca_path is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslobject_class = _CertificateCheck
    load_tls_files(context, settings)
    return context


def load_tls_files(context: ssl.SSLContext, settings: Settings) -> None:
    """Load certificate and authorities; new connections use them. Authorities are added, never removed."""
    if settings.tls.cert_path is None:
        raise ValueError("TLS cannot be disabled without a restart")
    context.load_cert_chain(settings.tls.cert_path, settings.tls.key_path)
    if settings.tls.client_ca_path is not None:
        context.load_verify_locations(settings.tls.client_ca_path)


def tls_files_error(error: ssl.SSLError) -> str:
    return f"tls.cert_path and tls.key_path are not a valid pair of PEM files: {error.reason or error}"


class _RefusedCertificates:
    """Logs refused client certificates, at most one line per minute: anyone who can connect can cause them."""

    def __init__(self) -> None:
        self._since_last = 0
        self._next_s = 0.0

    def add(self, reason: str) -> None:
        self._since_last += 1
        now_s = time.monotonic()
        if now_s >= self._next_s:
            log.warning(
                "a TLS connection was refused (%d since the last such line): %s; clients need a certificate that an"
                " authority in tls.client_ca_path signed",
                self._since_last,
                reason,
            )
            self._since_last, self._next_s = 0, now_s + LOG_EVERY_S


_refused: Final = _RefusedCertificates()


class _CertificateCheck(ssl.SSLObject):
    """A connection whose client must have a certificate."""

    failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason not in CERTIFICATE_REASONS:
                raise
            self.failure = error
            _refused.add(getattr(error, "verify_message", "") or "the client sent no certificate")
            # Send the alert, and wait until the client closes the connection or sends something.
            raise ssl.SSLWantReadError from error
