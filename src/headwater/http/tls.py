"""TLS of the server: certificate, authorities of clients, handshakes in progress, and refused connections.

A client whose certificate is missing or not trusted gets the TLS alert that says so, and the log has a line about it.
The event loop closes the connection as soon as a handshake fails, before the alert is sent; `_CertificateCheck`
therefore reports the failure one step later.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

from headwater.config import Settings

log = logging.getLogger("headwater.server")

CERTIFICATE_REASONS: Final = {"PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED"}
LOG_EVERY_S: Final = 60.0


class ServerTls(ssl.SSLContext):
    """TLS that limits the handshakes in progress: these connections are not open yet, but they have descriptors."""

    handshakes: WeakSet[ssl.SSLObject]
    has_space: Callable[[int], bool] | None = None
    """Whether one more connection is accepted beside this many handshakes."""

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Begin a handshake. Raises an error, which closes the connection, if there are too many."""
        if self.has_space is not None and not self.has_space(len(self.handshakes)):
            _crowded.add(f"too many connections are open, with {len(self.handshakes)} handshakes in progress")
            raise ssl.SSLError("too many connections")
        handshake = super().wrap_bio(*arguments, **named)
        self.handshakes.add(handshake)
        return handshake


def build_tls(settings: Settings) -> ServerTls | None:
    if settings.tls.cert_path is None or settings.tls.key_path is None:
        return None
    context = ServerTls(ssl.PROTOCOL_TLS_SERVER)
    context.handshakes = WeakSet()
    context.verify_flags = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).verify_flags
    context.set_alpn_protocols(["http/1.1"])
    context.sslobject_class = _Handshake
    if settings.tls.client_ca_path is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslobject_class = _CertificateCheck
    load_tls_files(context, settings)
    return context


def handshake_timeout_s(settings: Settings) -> float | None:
    """The time for a handshake, which is the beginning of a request; None without TLS."""
    return settings.server.read_timeout_secs if settings.tls.cert_path is not None else None


def load_tls_files(context: ssl.SSLContext, settings: Settings) -> None:
    """Load certificate and authorities; new connections use them. Authorities are added, never removed."""
    if settings.tls.cert_path is None:
        raise ValueError("TLS cannot be disabled without a restart")
    context.load_cert_chain(settings.tls.cert_path, settings.tls.key_path)
    if settings.tls.client_ca_path is not None:
        context.load_verify_locations(settings.tls.client_ca_path)


def tls_files_error(error: ssl.SSLError) -> str:
    return f"tls.cert_path and tls.key_path are not a valid pair of PEM files: {error.reason or error}"


class _Refused:
    """Logs refused connections, at most one line per minute: anyone who can connect can cause them."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._since_last = 0
        self._next_s = 0.0

    def add(self, reason: str) -> None:
        self._since_last += 1
        now_s = time.monotonic()
        if now_s >= self._next_s:
            log.warning(
                "a TLS connection was refused (%d since the last such line): %s; %s",
                self._since_last,
                reason,
                self._advice,
            )
            self._since_last, self._next_s = 0, now_s + LOG_EVERY_S


_refused: Final = _Refused("clients need a certificate that an authority in tls.client_ca_path signed")
_crowded: Final = _Refused("the limit is server.max_connections")


class _Handshake(ssl.SSLObject):
    """A connection that counts as a handshake until it is established or closed."""

    def do_handshake(self) -> None:
        super().do_handshake()
        context = self.context
        if isinstance(context, ServerTls):
            context.handshakes.discard(self)


class _CertificateCheck(_Handshake):
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
